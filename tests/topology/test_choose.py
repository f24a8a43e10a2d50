"""choose_nics: the nearest and fastest first, evenly over GPUs, no management NIC; and explain."""

import dataclasses
from collections import Counter

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import NicPolicy, PathKind, System, Topology

from .support import NAMES, machine, names


def first_of(topology, policy=None):
    return [topology.choose_nics(gpu, policy=policy)[0].name for gpu in topology.gpus]


def with_nics(topology, **changes):
    """The machine with fields of some NICs changed: mlx5_0={"state": "DOWN"}."""
    nics = tuple(dataclasses.replace(n, **changes.get(n.name, {})) for n in topology.nics)
    return Topology(dataclasses.replace(topology.system, nics=nics))


def test_every_gpu_of_a_dgx_h100_has_its_nic():
    assert first_of(machine("dgx-h100")) == [
        "mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nics"),
    [
        ("hgx-a100-4nic", [0, 0, 1, 1, 2, 2, 3, 3]),
        ("hgx-a100-8nic", [0, 1, 2, 3, 4, 5, 6, 7]),  # two GPUs and two NICs in a group
        ("gb200", [0, 1, 4, 5]),
        ("down-port", [0, 0, 2, 3]),
        ("vm-h200", [0, 1]),
    ],
)
def test_gpus_share_nics_evenly(name, nics):
    assert first_of(machine(name)) == [f"mlx5_{i}" for i in nics]


def test_physical_function_comes_before_its_virtual_functions():
    topology = machine("hgx-a100-4nic")
    twin = dataclasses.replace(topology.nics[0], name="mlx5_00", is_vf=True)
    nics = (twin, *topology.nics)
    both = Topology(dataclasses.replace(topology.system, nics=nics))
    assert first_of(both) == first_of(topology)
    assert names(both.choose_nics("cuda:0"))[:2] == ["mlx5_0", "mlx5_00"]


def test_unusable_nic_is_chosen_by_no_policy():
    topology = with_nics(machine("hgx-a100-4nic"), mlx5_0={"unusable": "EFA: no RC"})
    policy = NicPolicy(allow=["mlx5_0"], affinity={"cuda:0": ["mlx5_0"]}, allow_down=True)
    assert topology.choose_nics("cuda:0", policy=policy) == []
    assert "mlx5_0: not chosen: EFA: no RC" in topology.explain("cuda:0", policy=policy)


def test_four_gpus_use_eight_nics(tmp_path):
    """Of a machine whose eight NICs are all equally far from each GPU, each GPU starts with two."""
    system = machine("hgx-a100-8nic").system
    pci = tuple(dataclasses.replace(node, numa=0) for node in system.pci)
    nics = tuple(dataclasses.replace(nic, numa=0, pci=None) for nic in system.nics[:8])
    topology = Topology(System(system.numa[:1], pci, system.gpus[:4], nics))
    tiers = [topology.nic_tiers(gpu) for gpu in topology.gpus]
    assert [len(tier) for [tier] in tiers] == [8] * 4
    assert Counter(nic.name for [tier] in tiers for nic in tier[:2]) == Counter(names(nics))


def test_choice_is_independent_of_gpu_numbering():
    topology = machine("hgx-a100-8nic")
    moved = topology.with_gpu_order([5, "0000:07:00.0", topology.gpus[2].uuid])
    assert [gpu.pci for gpu in moved.gpus[:3]] == [topology.gpus[i].pci for i in (5, 0, 2)]
    assert first_of(moved)[:3] == [first_of(topology)[i] for i in (5, 0, 2)]
    assert (
        len(moved.gpus) == 8
        and moved.with_gpu_order([gpu.uuid for gpu in topology.gpus]) == topology
    )
    for order in ([8], ["GPU-x"], [0, 0], [""]):
        with pytest.raises(InvalidArgument, match=f"order must name each .* got {order[-1]!r}"):
            topology.with_gpu_order(order)


def test_gpu_order_accepts_gpu_objects():
    topology = machine("hgx-a100-8nic")
    moved = topology.with_gpu_order(topology.gpus[3:5])
    assert [gpu.pci for gpu in moved.gpus[:2]] == [gpu.pci for gpu in topology.gpus[3:5]]


@pytest.mark.parametrize("order", [5, None, "10", b"10"])
def test_gpu_order_must_be_a_list(order):
    message = f"with_gpu_order: order must be a list of GPUs, got {order!r}"
    with pytest.raises(InvalidArgument, match=message):
        machine("hgx-a100-8nic").with_gpu_order(order)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("5,0", [5, 0]), ("5,5", [5]), ("5,9,0", [5]), ("", []), ("-1", [])],
)
def test_gpu_order_follows_cuda_visible_devices(monkeypatch, visible, seen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    topology = machine("hgx-a100-8nic")
    assert topology.with_visible_gpus() == topology.with_gpu_order(seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert topology.with_visible_gpus() == topology


def test_distance_outranks_speed_and_speed_outranks_name():
    topology = with_nics(machine("down-port"), mlx5_2={"gbit_per_s": 200.0})
    assert names(topology.choose_nics("cuda:2")) == ["mlx5_3", "mlx5_2", "mlx5_0"]
    assert names(topology.choose_nics("cuda:0")) == ["mlx5_0", "mlx5_3", "mlx5_2"]


def test_infiniband_before_ethernet_of_the_same_speed():
    topology = with_nics(machine("down-port"), mlx5_2={"link_layer": "Ethernet"})
    assert names(topology.choose_nics("cuda:2"))[:2] == ["mlx5_3", "mlx5_2"]


def test_host_memory_prefers_nics_of_its_numa_node():
    assert names(machine("no-gpu").choose_nics("cpu:1")) == ["mlx5_1", "mlx5_0"]


def test_machine_without_nics_chooses_none():
    topology = machine("no-nic")
    assert topology.choose_nics("cuda:0") == []
    assert topology.explain("cuda:0") == "cuda:0: this machine has no NIC for RDMA"


def test_down_port_is_chosen_only_if_allowed():
    topology = machine("down-port")
    assert "mlx5_1: not chosen: port 1 is DOWN" in topology.explain("cuda:0").splitlines()
    down_too = NicPolicy(allow_down=True, allow_management=True)
    assert names(topology.choose_nics("cuda:1", policy=down_too)) == [
        "mlx5_0", "mlx5_1", "mlx5_3", "mlx5_2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gbit_per_s": 100.0}, "100 Gb/s compared with 400 Gb/s: taken for a management NIC"),
        ({"link_layer": "Ethernet", "has_gid": False}, "port 1 has no GID"),
        ({"state": "INIT"}, "port 1 is INIT"),
    ],
)
def test_unsuitable_nics_are_explained(changes, reason):
    topology = with_nics(machine("down-port"), mlx5_0=changes)
    for location in topology.locations:
        assert "mlx5_0" not in names(topology.choose_nics(location))
        assert f"mlx5_0: not chosen: {reason}" in topology.explain(location)


def test_nic_of_the_default_route_is_left_out_as_management():
    """It shows a management NIC, unless that is on a GPU's switch, or the only one so fast."""
    gb200 = machine("gb200")
    assert "mlx5_2: not chosen: it carries the default route" in gb200.explain("cuda:0")
    faster = with_nics(gb200, mlx5_2={"gbit_per_s": 800.0})
    assert first_of(faster)[0] == "mlx5_2"
    bonded = machine("bonded")
    assert first_of(bonded) == ["mlx5_bond_0"] * 2 + ["mlx5_bond_1"] * 2
    everywhere = {f"mlx5_{i}": {"has_default_route": True} for i in range(6)}
    assert len(with_nics(gb200, **everywhere).choose_nics("cuda:0")) == 5
    assert "mlx5_2" in names(gb200.choose_nics("cpu:0", policy=NicPolicy(allow_management=True)))
    assert names(gb200.choose_nics("cpu:0", policy=NicPolicy(allow=["mlx5_2"]))) == ["mlx5_2"]


def test_policy_allow_deny_limit_and_other_fields():
    topology = machine("dgx-h100")

    def chosen(**fields):
        return names(topology.choose_nics("cuda:0", policy=NicPolicy(**fields)))

    assert chosen(allow=["mlx5_4", "mlx5_11"]) == ["mlx5_4", "mlx5_11"]
    assert chosen(deny=["mlx5_0"])[0] != "mlx5_0"
    assert chosen(limit=1) == ["mlx5_0"]
    assert chosen(max_path=PathKind.PXB) == ["mlx5_0"]
    assert chosen(link_layers=["Ethernet"]) == ["mlx5_2", "mlx5_8"]
    assert chosen(affinity={"cuda:0": ["mlx5_11"]})[:2] == ["mlx5_11", "mlx5_0"]
    assert "mlx5_2" not in chosen(min_speed_ratio=0.75)
    lines = topology.explain("cuda:0", policy=NicPolicy(deny=["mlx5_0"], limit=1)).splitlines()
    assert "mlx5_0: not chosen: the policy denies it" in lines
    assert sum("not chosen" not in line for line in lines) == 1
    assert sum("not chosen: the policy's limit is 1" in line for line in lines) == 10


@pytest.mark.parametrize("name", NAMES)
def test_explain_has_a_line_for_every_nic(name):
    topology = machine(name)
    for location in topology.locations:
        chosen = names(topology.choose_nics(location))
        lines = topology.explain(location).splitlines()
        said = [line.split(":")[0] for line in lines]
        if topology.nics:
            assert said[: len(chosen)] == chosen
            assert sorted(said) == sorted(names(topology.nics))
            assert all("not chosen: " in line for line in lines[len(chosen) :])


def test_unreachable_nic_is_left_out_for_that_gpu():
    topology = machine("down-port")
    assert first_of(topology) == ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_3"]
    topology.mark_unreachable("cuda:2", "mlx5_2", "4096 bytes written, none arrived")
    assert first_of(topology) == ["mlx5_0", "mlx5_0", "mlx5_3", "mlx5_2"]  # and cuda:3 makes room
    line = "mlx5_2: not chosen: cannot reach cuda:2: 4096 bytes written, none arrived"
    assert line in topology.explain("cuda:2").splitlines()
    assert "mlx5_2: no. 1" in topology.explain("cuda:3")
    moved = topology.with_gpu_order([2])
    assert moved.unreachable == {("cuda:0", "mlx5_2"): "4096 bytes written, none arrived"}
    topology.mark_reachable("cuda:2", "mlx5_2")
    assert first_of(topology) == ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_3"]


def test_unknown_names_are_rejected():
    topology = machine("down-port")
    for call in (topology.choose_nics, topology.explain, topology.nic_tiers):
        op = call.__name__
        for location in ("cuda:4", "mlx5_0", None, ["cuda:0"]):
            with pytest.raises(InvalidArgument, match=f"{op}: location must be one of cpu:0, "):
                call(location)
        for field in ({"deny": ["mlx5_7"]}, {"allow": ["mlx5_7"]}, {"affinity": {"a": ["mlx5_7"]}}):
            message = rf"{op}: policy.{next(iter(field))} must be a NIC .*\(mlx5_0, .* got 'mlx5_7'"
            with pytest.raises(InvalidArgument, match=message):
                call("cuda:0", policy=NicPolicy(**field))
        with pytest.raises(InvalidArgument, match=f"{op}: policy must be a NicPolicy"):
            call("cuda:0", policy={"deny": []})
    elsewhere = NicPolicy(affinity={"cuda:9": ["mlx5_0"]})
    with pytest.raises(InvalidArgument, match="policy.affinity must be one of cpu:0, .* 'cuda:9'"):
        topology.choose_nics("cuda:0", policy=elsewhere)
    with pytest.raises(InvalidArgument, match="mark_unreachable: nic must be a NIC .* got 'eth0'"):
        topology.mark_unreachable("cuda:0", "eth0", "")
    with pytest.raises(InvalidArgument, match="mark_reachable: location must be one of"):
        topology.mark_reachable("cuda:9", "mlx5_0")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allow": "mlx5_0"}, "allow must be a list of names, got 'mlx5_0'"),
        ({"deny": None}, "deny must be a list of names, got None"),
        ({"link_layers": ["Token Ring"]}, "link_layers must be of .* got 'Token Ring'"),
        ({"max_path": "PIX"}, "max_path must be a PathKind, got 'PIX'"),
        ({"limit": 0}, "limit must be an integer >= 1 or None, got 0"),
        ({"min_speed_ratio": 2}, r"min_speed_ratio must be a number in \[0, 1\], got 2"),
        ({"affinity": 3}, "affinity must be like .* got 3"),
        ({"affinity": {"cuda:0": "mlx5_0"}}, "affinity must be a list of names, got 'mlx5_0'"),
    ],
)
def test_bad_policy_is_rejected(fields, message):
    with pytest.raises(InvalidArgument, match=f"NicPolicy: {message}"):
        NicPolicy(**fields)


def test_results_are_copies_owned_by_the_caller():
    topology = machine("down-port")
    topology.choose_nics("cuda:0").clear()
    topology.unreachable.update({("cuda:0", "mlx5_0"): "no"})
    assert first_of(topology)[0] == "mlx5_0"


def test_policies_compare_and_hash_by_value():
    assert NicPolicy(deny=["a"]) == NicPolicy(deny=("a",))
    assert len({NicPolicy(affinity={"cuda:0": ["a"]}), NicPolicy(affinity={"cuda:0": ("a",)})}) == 1
    topology = machine("down-port")
    for i in range(200):  # more than are remembered
        assert len(topology.choose_nics("cuda:0", policy=NicPolicy(min_speed_ratio=i / 400))) == 3
