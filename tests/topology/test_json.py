"""to_json and from_json: a machine round-trips, and malformed input gets a clear error."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import Topology

from .support import MACHINES, NAMES, check_or_refused, machine


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trips(name, tmp_path):
    topology = machine(name)
    path = tmp_path / "saved.json"
    path.write_text(topology.to_json())
    assert Topology.from_json(path) == topology
    assert topology.to_json() == (MACHINES / f"{name}.json").read_text()


def test_json_keeps_unreachable_pairs(tmp_path):
    topology = machine("down-port")
    topology.mark_unreachable("cuda:0", "mlx5_0", "the probe's bytes did not arrive")
    path = tmp_path / "saved.json"
    path.write_text(topology.to_json())
    again = Topology.from_json(path)
    assert again == topology and again != machine("down-port")
    assert again.unreachable == {("cuda:0", "mlx5_0"): "the probe's bytes did not arrive"}


def test_json_keeps_unusable_devices(tmp_path):
    system = machine("no-gpu").system
    nic = dataclasses.replace(system.nics[0], unusable="EFA: no RC queue pairs", is_vf=True)
    topology = Topology(dataclasses.replace(system, nics=(nic, *system.nics[1:])))
    path = tmp_path / "saved.json"
    path.write_text(topology.to_json())
    assert Topology.from_json(path) == topology
    assert '"is_vf": true, "unusable": "EFA: no RC queue pairs"' in topology.to_json()


@pytest.mark.parametrize("name", NAMES)
def test_pickle_round_trips(name):
    topology = machine(name)
    for place in topology.locations:
        for nic in topology.nics[:1]:
            topology.mark_unreachable(place, nic, "its port is broken")
    again = pickle.loads(pickle.dumps(topology))
    assert again == topology
    assert again.to_mooncake_json() == topology.to_mooncake_json()


GOOD = json.loads((MACHINES / "no-gpu.json").read_text())


def changed(**changes):
    return json.dumps(GOOD | changes)


def node(**fields):
    return {"address": "0000:01:00.0", "parent": None, "host_bridge": "pci0000:00"} | fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("\xff", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "its format must be 1, got 'list'"),
        ("{}", "its format must be 1, got None"),
        (changed(format=2), "its format must be 1, got 2"),
        (changed(disks=[]), "it has no part 'disks'"),
        (changed(pci=3), "pci must be a list of objects, got 3"),
        (changed(pci=[{"address": "0000:01:00.0"}]), r"pci\[0\] must have parent"),
        (changed(pci=[node(speed=1)]), r"pci\[0\] has no field 'speed'"),
        (changed(pci=[node(width="16")]), r"pci\[0\].width must be int, got '16'"),
        (changed(pci=[node(gt_per_s=float("nan"))]), r"pci\[0\].gt_per_s must be float, got 'nan'"),
        (changed(pci=[node(is_switch=1)]), r"pci\[0\].is_switch must be bool, got '1'"),
        (changed(nics=[], pci=[node(parent="0000:02:00.0")]), "below 0000:02:00.0, which is not"),
        (changed(nics=[], pci=[node(parent="0000:01:00.0")]), "is above itself: a loop"),
        (changed(nics=[], pci=[node(address="1:2")]), "PCI device '1:2' has no address like"),
        (changed(nics=[], pci=[node(numa=5)]), "0000:01:00.0 is of NUMA node 5, which is not"),
        (changed(nics=[{"name": "a", "pci": "0000:99:00.0"}]), "NIC a is PCI device 0000:99:00.0"),
        (changed(nics=[{"name": "a"}, {"name": "a"}]), "NIC a is there 2 times"),
        (changed(nics=[{"name": "cuda:0"}]), "must have a name of its own, got 'cuda:0'"),
        (changed(nics=[{"name": "a", "link_layer": "Token Ring"}]), "link_layer must be one of"),
        (changed(numa=[{"id": -1}]), "a NUMA node must have a number from 0, got -1"),
        (changed(nics=[{"name": "a", "port": 0}]), "a's port must be in 1 to 255, got 0"),
        (changed(gpus=[{"index": 1, "pci": "0000:31:00.0"}]), "must be cuda:0, got cuda:1"),
        (changed(gpus=[{"index": 0, "pci": "0000:99:00.0"}]), "cuda:0 is PCI device 0000:99:00.0"),
        (changed(unreachable=[{"nic": "mlx5_0"}]), r"unreachable\[0\] must have location, nic and"),
        (
            changed(unreachable=[{"location": "cuda:7", "nic": "mlx5_0", "reason": ""}]),
            "location must be one of cpu:0, cpu:1, got 'cuda:7'",
        ),
    ],
)
def test_malformed_file_is_rejected(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=f"from_json: path must be .*{message}"):
        Topology.from_json(path)


def test_pci_parent_cycle_is_rejected(tmp_path):
    path = tmp_path / "loop.json"
    above, below = node(parent="0000:02:00.0"), node(address="0000:02:00.0", parent="0000:01:00.0")
    path.write_text(changed(nics=[], pci=[above, below]))
    with pytest.raises(InvalidArgument, match="PCI device 0000:01:00.0 .*loop"):
        Topology.from_json(path)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_file_is_read_or_rejected(data, tmp_path_factory):
    content = bytearray((MACHINES / f"{data.draw(st.sampled_from(NAMES))}.json").read_bytes())
    for _ in range(data.draw(st.integers(0, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) // 2, 2 * len(content))) :]
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(content)
    check_or_refused(lambda: Topology.from_json(path))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_value_in_any_field_is_read_or_rejected(data, tmp_path_factory):
    document = json.loads((MACHINES / "down-port.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        group = data.draw(st.sampled_from(["numa", "pci", "gpus", "nics"]))
        entry = data.draw(st.sampled_from(document[group]))
        entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(ANYTHING)
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_text(json.dumps(document))
    check_or_refused(lambda: Topology.from_json(path))
