"""The names, the order of the arguments and their defaults, as in PyPI's 0.3.13.post1.

Those of the ``_on_cuda`` calls are of its source: the wheel for CPUs has none.
"""

import inspect

import pytest

from mooncake_serving.compat import mooncake

ONE = ["target_hostname", "buffer", "peer_buffer_address", "length"]
MANY = ["target_hostname", "buffers", "peer_buffer_addresses", "lengths"]
HINT = ("transport_hint", "")
TOLD = [("notify", None), HINT]
IN_STREAM = [("stream_ptr", 0), HINT]

SIGNATURES = {
    "initialize": ["local_hostname", "metadata_server", "protocol", "device_name"],
    "initialize_ext": [
        *("local_hostname", "metadata_server", "protocol", "device_name"),
        "metadata_type",
    ],
    "get_rpc_port": [],
    "get_engine": [],
    "get_local_topology": [("device_name", None)],
    "register_memory": ["buffer_addr", "capacity", ("location", "*")],
    "unregister_memory": ["buffer_addr"],
    "batch_register_memory": ["buffer_addresses", "capacities", ("location", "*")],
    "batch_unregister_memory": ["buffer_addresses"],
    "allocate_managed_buffer": ["length"],
    "free_managed_buffer": ["buffer_addr", "length"],
    "get_first_buffer_address": ["segment_name"],
    "write_bytes_to_buffer": ["dest_address", "src_ptr", "length"],
    "read_bytes_from_buffer": ["source_address", "length"],
    "transfer_sync_write": [*ONE, HINT],
    "transfer_sync_read": [*ONE, HINT],
    "transfer_sync": [*ONE, "opcode", *TOLD],
    "batch_transfer_sync_write": [*MANY, HINT],
    "batch_transfer_sync_read": [*MANY, HINT],
    "batch_transfer_sync": [*MANY, "opcode", *TOLD],
    "batch_transfer_async_write": [*MANY, HINT],
    "batch_transfer_async_read": [*MANY, HINT],
    "batch_transfer_async": [*MANY, "opcode", HINT],
    "get_batch_transfer_status": ["batch_ids"],
    "transfer_submit_write": [*ONE, HINT],
    "transfer_check_status": ["batch_id"],
    "transfer_write_on_cuda": [*ONE, *IN_STREAM],
    "transfer_read_on_cuda": [*ONE, *IN_STREAM],
    "batch_transfer_write_on_cuda": [*MANY, *IN_STREAM],
    "batch_transfer_read_on_cuda": [*MANY, *IN_STREAM],
    "get_notifies": [],
    "send_probe": ["peer_server_name"],
    "warmup_efa_segment": ["segment_name"],
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_arguments(method):
    parameters = list(
        inspect.signature(getattr(mooncake.TransferEngine, method)).parameters.values()
    )
    found = [
        one.name if one.default is inspect.Parameter.empty else (one.name, one.default)
        for one in parameters[1:]
    ]
    assert found == SIGNATURES[method]


def test_enums_and_flags():
    assert [one.name for one in mooncake.TransferOpcode] == ["Read", "Write"]
    assert (mooncake.Read, mooncake.Write) == (0, 1)
    assert mooncake.TransferEngine.TransferOpcode is mooncake.TransferOpcode
    flags = [name for name in mooncake.__all__ if name.startswith("SUPPORT_")]
    assert len(flags) == 6 and not any(getattr(mooncake, flag) for flag in flags)


def test_notify():
    notify = mooncake.TransferNotify()
    assert (notify.name, notify.msg) == ("", "")
    notify.msg = "done"
    assert notify == mooncake.TransferNotify(name="", msg="done")


def test_engine_and_store_modules_export_mooncakes_names():
    from mooncake_serving.compat.mooncake import engine, store

    assert {"TransferEngine", "TransferNotify", "TransferOpcode"} < set(engine.__all__)
    assert engine.Write is engine.TransferOpcode.Write
    assert store.PROCESSING is store.TaskStatus.PROCESSING
    assert store.COMPLETE is store.ReplicaStatus.COMPLETE
    assert store.GENERAL is store.ObjectDataType.GENERAL
    for module in (engine, store):
        assert all(hasattr(module, name) for name in module.__all__)


def test_memory_of_the_allocator_is_registered_and_freed():
    engine = mooncake.TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    allocator = mooncake.store.MooncakeHostMemAllocator()
    address = allocator.alloc(4096)
    assert engine.register_memory(address, 4096) == 0
    assert engine.read_bytes_from_buffer(address, 4096) == bytes(4096)
    assert engine.unregister_memory(address) == 0
    engine.close()
    assert allocator.free(address + 1) == -1
    assert allocator.free(address) == 0
    assert allocator.free(address) == -1
    assert allocator.free([]) == allocator.free(None) == -1


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (0, "size must be an integer from 1"),
        (-1, "size must be an integer from 1"),
        (None, "size must be an integer from 1"),
        (1 << 60, "alloc: "),
    ],
)
def test_failed_allocation_raises_runtime_error(size, reason):
    """As Mooncake's, which engines may expect."""
    with pytest.raises(RuntimeError, match=reason):
        mooncake.store.MooncakeHostMemAllocator().alloc(size)
