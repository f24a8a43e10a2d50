"""What agents tell of themselves: full, partial, stale, broken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import metadata, nixl_agent

from ..support import SIZE, addressed
from .support import BLOCK, near_agent, reg_list, settle


@pytest.fixture
def far():
    with near_agent("far", addressed(SIZE)) as far:
        yield far


def test_known_or_not(near, far):
    agent = near.agent
    assert not agent.check_remote_metadata("far")
    assert agent.add_remote_agent(far.metadata) == b"far"
    inside = agent.get_xfer_descs(far.blocks(), "DRAM")
    outside = agent.get_xfer_descs([(far.address + SIZE - 1, 2, 0)], "DRAM")
    assert agent.check_remote_metadata("far") and agent.check_remote_metadata(b"far", inside)
    assert not agent.check_remote_metadata("far", outside)
    assert not agent.check_remote_metadata("far", agent.get_xfer_descs(far.blocks(), "VRAM"))
    assert not agent.check_remote_metadata("far", agent.get_xfer_descs([(0, 1, 3)], "FILE"))
    assert not agent.check_remote_metadata("nobody")
    agent.remove_remote_agent(b"far")
    assert not agent.check_remote_metadata("far")


def test_of_itself_and_of_another_with_the_name(near, far):
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="that of near"):
        near.agent.add_remote_agent(near.metadata)
    near.agent.add_remote_agent(far.metadata)
    other = nixl_agent("far")
    with pytest.raises(nixl_bind.nixlNotAllowedError, match="until remove_remote_agent"):
        near.agent.add_remote_agent(other.get_agent_metadata())


def test_memory_that_is_registered_later(near, far):
    near.agent.add_remote_agent(far.metadata)
    more = addressed(8192)
    far.agent.register_memory(reg_list(more), "DRAM")
    descs = near.agent.get_xfer_descs([(more.ctypes.data, 8192, 0)], "DRAM")
    assert not near.agent.check_remote_metadata("far", descs)
    near.agent.add_remote_agent(far.metadata)
    assert near.agent.check_remote_metadata("far", descs)
    far.agent.deregister_memory(far.agent.get_reg_descs(reg_list(more), "DRAM"))
    near.agent.add_remote_agent(far.metadata)
    assert not near.agent.check_remote_metadata("far", descs)


def test_in_parts(near, far):
    more = addressed(8192)
    reg = far.agent.register_memory(reg_list(more), "DRAM")
    part = far.agent.get_partial_agent_metadata(reg)
    assert near.agent.add_remote_agent(part) == b"far"
    descs = near.agent.get_xfer_descs([(more.ctypes.data, 8192, 0)], "DRAM")
    assert near.agent.check_remote_metadata("far", descs)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="connection information"):
        near.agent.prep_xfer_dlist("far", descs)
    nothing = far.agent.get_reg_descs(np.empty((0, 3), np.uint64), "DRAM")
    near.agent.add_remote_agent(far.agent.get_partial_agent_metadata(nothing))
    remote = near.agent.prep_xfer_dlist("far", descs)
    local = near.agent.prep_xfer_dlist("", [(near.address, 8192, 0)], "DRAM")
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    near.agent.transfer(handle)
    assert settle(near.agent, handle) == "DONE"
    whole = near.agent.get_xfer_descs(far.blocks(), "DRAM")
    assert not near.agent.check_remote_metadata("far", whole)
    both = far.agent.get_reg_descs(reg_list(far.memory), "DRAM")
    near.agent.add_remote_agent(far.agent.get_partial_agent_metadata(both, True, ["UCX"]))
    assert near.agent.check_remote_metadata("far", whole)
    assert near.agent.check_remote_metadata("far", descs)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="inside registered memory"):
        far.agent.get_partial_agent_metadata(far.agent.get_reg_descs([(8, 8, 0, "")], "DRAM"))


@pytest.mark.parametrize(
    "broken, message",
    [
        (b"", "must come from this library"),
        (b"nixlSerDes|...", "must come from this library"),
        ("text", "must be bytes, got str"),
        (None, "must be bytes, got NoneType"),
    ],
)
def test_what_is_no_metadata(near, broken, message):
    with pytest.raises(nixl_bind.nixlMismatchError, match=message):
        near.agent.add_remote_agent(broken)
    with pytest.raises(nixl_bind.nixlMismatchError, match=message):
        near.agent.deserialize_descs(broken)


def test_of_another_version_or_kind(near, far):
    data = bytearray(far.metadata)
    data[8] = 9
    with pytest.raises(nixl_bind.nixlMismatchError, match="version 1, got version 9"):
        near.agent.add_remote_agent(bytes(data))
    descs = near.agent.get_xfer_descs(near.blocks(), "DRAM")
    with pytest.raises(nixl_bind.nixlMismatchError, match="must be AgentMetadata"):
        near.agent.add_remote_agent(near.agent.get_serialized_descs(descs))
    with pytest.raises(nixl_bind.nixlMismatchError, match="must be Descriptors"):
        near.agent.deserialize_descs(far.metadata)


def test_every_changed_byte_is_noticed(near, far):
    data = far.metadata
    for place in range(len(data)):
        broken = bytearray(data)
        broken[place] ^= 0x10
        with pytest.raises(nixl_bind.nixlMismatchError):
            near.agent.add_remote_agent(bytes(broken))
    for size in range(len(data)):
        with pytest.raises(nixl_bind.nixlMismatchError):
            near.agent.add_remote_agent(data[:size])


def test_whole_but_wrong():
    body = metadata.AgentMetadata("far", "127.0.0.1:1", "", False, {"DRAM_SEG": b"1234567"})
    with pytest.raises(nixl_bind.nixlMismatchError, match="whole rows"):
        metadata.decode_metadata(metadata.encode_metadata(body))
    body = metadata.AgentMetadata("far", ranges={"TAPE_SEG": b""})
    with pytest.raises(nixl_bind.nixlMismatchError, match="whole rows"):
        metadata.decode_metadata(metadata.encode_metadata(body))
    with pytest.raises(nixl_bind.nixlMismatchError, match="a name"):
        metadata.decode_metadata(metadata.encode_metadata(metadata.AgentMetadata("")))


@pytest.mark.parametrize("field", ["name", "address", "machine"])
def test_fields_are_bounded(field):
    fields = {"name": "x", field: "y" * 1025}
    broken = metadata.encode_metadata(metadata.AgentMetadata(**fields))
    with pytest.raises(nixl_bind.nixlMismatchError, match=f"an? {field} of . to .* got 1025 bytes"):
        metadata.decode_metadata(broken)


def test_an_address_is_never_a_file(near, far):
    body = metadata.decode_metadata(far.metadata)
    body.address = "file:/etc/passwd"
    near.agent.add_remote_agent(metadata.encode_metadata(body))
    local = near.agent.prep_xfer_dlist("", near.blocks(), "DRAM")
    remote = near.agent.prep_xfer_dlist("far", far.blocks(), "DRAM")
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    with pytest.raises(nixl_bind.nixlRemoteDisconnectError, match="must be an engine's"):
        near.agent.transfer(handle)
        settle(near.agent, handle)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_clear_error(data):
    for decode in (metadata.decode_metadata, metadata.decode_descs):
        with pytest.raises(nixl_bind.nixlMismatchError):
            decode(metadata.MAGIC + data)


def test_lists_of_descriptors_travel(near):
    agent = near.agent
    descs = agent.get_xfer_descs(near.blocks(), "DRAM")
    again = agent.deserialize_descs(agent.get_serialized_descs(descs))
    assert again == descs and isinstance(again, nixl_bind.nixlXferDList)
    regs = agent.get_reg_descs([(0, BLOCK, 7, "rw:/a"), (0, BLOCK, 8, b"\xff")], "FILE")
    again = agent.deserialize_descs(agent.get_serialized_descs(regs))
    assert again == regs and again[1] == (0, BLOCK, 8, b"\xff")


@pytest.mark.parametrize(
    "call, arguments",
    [
        ("send_local_metadata", ()),
        ("send_local_metadata", ("127.0.0.1", 8888)),
        ("fetch_remote_metadata", ("far",)),
        ("invalidate_local_metadata", ()),
        ("send_partial_agent_metadata", (None, True)),
    ],
)
def test_there_is_no_server_of_metadata(near, call, arguments):
    with pytest.raises(nixl_bind.nixlNotSupportedError, match=f"{call}: .*get_agent_metadata"):
        getattr(near.agent, call)(*arguments)
