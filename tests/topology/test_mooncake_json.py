"""to_mooncake_json: the text that Mooncake's own Topology::toString() gives for the same matrix.

The expected text was written by jsoncpp 1.9.5's Value::toStyledString, and is kept byte for byte.
"""

import json

from mooncake_kernels.topology import NicPolicy
from mooncake_kernels.topology.mooncake_json import to_text

from .support import machine

NO_GPU = """{
\t"cpu:0" : 
\t[
\t\t[
\t\t\t"mlx5_0"
\t\t],
\t\t[
\t\t\t"mlx5_1"
\t\t]
\t],
\t"cpu:1" : 
\t[
\t\t[
\t\t\t"mlx5_1"
\t\t],
\t\t[
\t\t\t"mlx5_0"
\t\t]
\t]
}
"""
EMPTY_LISTS = """{
\t"cpu:0" : 
\t[
\t\t[],
\t\t[]
\t],
\t"cuda:10" : 
\t[
\t\t[
\t\t\t"a"
\t\t],
\t\t[]
\t],
\t"cuda:2" : 
\t[
\t\t[
\t\t\t"mlx5_0",
\t\t\t"mlx5_1"
\t\t],
\t\t[
\t\t\t"mlx5_2"
\t\t]
\t]
}
"""


def test_text_matches_jsoncpp_byte_for_byte():
    assert machine("no-gpu").to_mooncake_json() == NO_GPU
    matrix = {"cuda:10": [["a"], []], "cuda:2": [["mlx5_0", "mlx5_1"], ["mlx5_2"]]}
    assert to_text(matrix | {"cpu:0": [[], []]}) == EMPTY_LISTS
    assert to_text({}) == "{}\n"


def test_dgx_h100_matrix():
    matrix = json.loads(machine("dgx-h100").to_mooncake_json(policy=NicPolicy(
        deny=["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]
    )))  # fmt: skip
    assert list(matrix) == ["cpu:0", "cpu:1", *(f"cuda:{i}" for i in range(8))]
    here, there = (
        ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"],
        ["mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"],
    )
    assert matrix["cpu:0"] == [here, there]
    assert matrix["cpu:1"] == [there, here]
    for gpu, nic in enumerate([*here, *there]):
        preferred, others = matrix[f"cuda:{gpu}"]
        assert preferred == [nic]
        assert sorted([nic, *others]) == sorted([*here, *there])


def test_gpus_with_two_equal_nics_start_with_different_ones():
    matrix = json.loads(machine("hgx-a100-8nic").to_mooncake_json())
    assert matrix["cuda:0"][0] == ["mlx5_0", "mlx5_1"]
    assert matrix["cuda:1"][0] == ["mlx5_1", "mlx5_0"]
    assert matrix["cpu:2"][0] == []  # as Mooncake: none is of this node
    assert len(matrix["cpu:2"][1]) == 9


def test_unusable_nic_is_in_no_list():
    topology = machine("down-port")
    topology.mark_unreachable("cuda:3", "mlx5_2", "")
    matrix = json.loads(topology.to_mooncake_json())
    assert matrix["cuda:3"] == [["mlx5_3"], ["mlx5_0"]]
    assert "mlx5_1" not in str(matrix)
    assert json.loads(machine("no-nic").to_mooncake_json())["cuda:0"] == [[], []]
