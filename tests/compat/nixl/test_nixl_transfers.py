"""Transfers between agents, over each transport, compared bitwise."""

import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import nixl_agent, nixl_agent_config, transfers
from mooncake_serving.compat.nixl.core import transports_of

from ..support import SIZE, UNTOUCHED, WAIT_S, addressed, in_threads, untouched
from .support import BLOCK, NUM_BLOCKS, near_agent, settle, sides


def test_write_by_index(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    sources, targets = [5, 0, 7], np.array([1, 250, 3], np.int32)
    handle = agent.make_prepped_xfer("WRITE", local, sources, remote, targets)
    assert agent.transfer(handle) in ("DONE", "PROC")
    assert settle(agent, handle) == "DONE"
    expected = untouched(SIZE).reshape(-1, BLOCK)
    expected[targets] = addressed(SIZE).reshape(-1, BLOCK)[sources]
    np.testing.assert_array_equal(pair.far.read(), expected.reshape(-1))
    assert agent.check_xfer_state(handle) == "DONE"
    agent.release_xfer_handle(handle)


def test_read_of_512_blocks(pair):
    agent = pair.near.agent
    pair.near.memory[:] = UNTOUCHED
    if hasattr(pair.far, "call"):
        pair.far.call("fill")
    else:
        pair.far.memory[:] = addressed(SIZE)
    agent.add_remote_agent(pair.far.metadata)
    local = agent.prep_xfer_dlist("", pair.near.blocks(2048), "DRAM")
    remote = agent.prep_xfer_dlist("far", pair.far.blocks(2048), "DRAM")
    order = np.random.default_rng(0).permutation(512)
    handle = agent.make_prepped_xfer("READ", local, np.arange(512), remote, order)
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    expected = addressed(SIZE).reshape(-1, 2048)[order]
    np.testing.assert_array_equal(pair.near.memory, expected.reshape(-1))


def test_the_same_handle_again(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    for value in range(5):
        pair.near.memory[:BLOCK] = value
        agent.transfer(handle)
        assert settle(agent, handle) == "DONE"
        assert (pair.far.read()[:BLOCK] == value).all()


def test_many_transfers_at_once(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handles = [
        agent.make_prepped_xfer("WRITE", local, [i], remote, [NUM_BLOCKS - 1 - i])
        for i in range(NUM_BLOCKS)
    ]
    for handle in handles:
        agent.transfer(handle)
    assert {settle(agent, handle) for handle in handles} == {"DONE"}
    expected = addressed(SIZE).reshape(-1, BLOCK)[::-1]
    np.testing.assert_array_equal(pair.far.read(), expected.reshape(-1))
    for handle in handles:
        agent.release_xfer_handle(handle)


def test_threads_share_an_agent(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    each = NUM_BLOCKS // 8

    def run(index: int) -> None:
        mine = np.arange(index * each, (index + 1) * each)
        for _ in range(5):
            handle = agent.make_prepped_xfer("WRITE", local, mine, remote, mine)
            agent.transfer(handle)
            assert settle(agent, handle) == "DONE"
            agent.release_xfer_handle(handle)

    in_threads(8, run)
    np.testing.assert_array_equal(pair.far.read(), addressed(SIZE))


def test_initialize_xfer_of_unequal_blocks(pair):
    agent = pair.near.agent
    agent.add_remote_agent(pair.far.metadata)
    sizes = [1, 100, 4096, 70000]
    starts = np.cumsum([0, *sizes[:-1]])
    near = [(pair.near.address + int(s), n, 0) for s, n in zip(starts, sizes, strict=True)]
    far = [(pair.far.address + int(s) + 13, n, 0) for s, n in zip(starts, sizes, strict=True)]
    handle = agent.initialize_xfer(
        "WRITE", agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "DRAM"), b"far"
    )
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    expected = untouched(SIZE)
    expected[13 : 13 + sum(sizes)] = addressed(SIZE)[: sum(sizes)]
    np.testing.assert_array_equal(pair.far.read(), expected)


def test_strided_runs(pair):
    agent = pair.near.agent
    agent.add_remote_agent(pair.far.metadata)
    runs = np.array(
        [[pair.near.address, 512, 0, 4096, 3], [pair.near.address + 65536, 512, 0, 512, 2]],
        np.uint64,
    )
    local = agent.prep_xfer_dlist("", runs, "DRAM")
    remote = agent.prep_xfer_dlist("far", pair.far.blocks(512), "DRAM")
    handle = agent.make_prepped_xfer("WRITE", local, range(5), remote, range(5))
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    starts = [0, 4096, 8192, 65536, 66048]
    expected = np.concatenate([addressed(SIZE)[start:][:512] for start in starts])
    np.testing.assert_array_equal(pair.far.read()[: 5 * 512], expected)


def test_loopback(near):
    agent = near.agent
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", near.blocks(), "DRAM")
    remote = agent.prep_xfer_dlist("near", near.blocks(), "DRAM")
    handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [9], b"mine")
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    np.testing.assert_array_equal(near.memory[9 * BLOCK :][:BLOCK], addressed(SIZE)[:BLOCK])
    assert agent.get_new_notifs() == {"near": [b"mine"]}


def test_tensors():
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    one, two = nixl_agent("one"), nixl_agent("two")
    one.register_memory(source)
    two.register_memory([target])
    one.add_remote_agent(two.get_agent_metadata())
    handle = one.initialize_xfer(
        "WRITE", one.get_xfer_descs(source), one.get_xfer_descs([target]), "two"
    )
    one.transfer(handle)
    assert settle(one, handle) == "DONE"
    assert torch.equal(source, target)


def test_telemetry(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handle = agent.make_prepped_xfer("WRITE", local, [0, 1, 2], remote, [0, 1, 2])
    before = time.monotonic()
    agent.transfer(handle)
    settle(agent, handle)
    after = time.monotonic()
    time.sleep(0.2)
    told = agent.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (3 * BLOCK, 3)
    assert int(before * 1e6) <= told.startTime <= after * 1e6
    assert 0 <= told.postDuration <= (after - before) * 1e6
    assert 0 <= told.xferDuration <= (after - before) * 1e6 + 1


def test_telemetry_ends_when_the_transfer_does(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handle = agent.make_prepped_xfer("WRITE", local, range(64), remote, range(64))
    agent.transfer(handle)  # also opens the peer
    settle(agent, handle)
    begin = time.monotonic()
    agent.transfer(handle)
    while pair.near.agent.agent.engine.stats()["peers"] and not _is_over(handle):
        time.sleep(0.001)
    over = time.monotonic()
    time.sleep(1.0)
    assert settle(agent, handle) == "DONE"
    assert agent.get_xfer_telemetry(handle).xferDuration <= (over - begin) * 1e6 + 1


def _is_over(handle) -> bool:
    return handle.job._ticket is not None and handle.job._ticket.done


def test_no_telemetry_unless_it_is_captured(near, monkeypatch):
    agent = nixl_agent("quiet", nixl_agent_config())
    agent.register_memory([(near.address, SIZE, 0, "")], "DRAM")
    rows = near.blocks()
    handles = []
    for one in (agent, near.agent):
        local = one.prep_xfer_dlist("", rows, "DRAM")
        remote = one.prep_xfer_dlist(one.name, rows, "DRAM")
        handles.append(one.make_prepped_xfer("READ", local, [0], remote, [1]))
    with pytest.raises(nixl_bind.nixlNoTelemetryError, match="capture_telemetry"):
        agent.get_xfer_telemetry(handles[0])
    with pytest.raises(nixl_bind.nixlNotPostedError):
        near.agent.get_xfer_telemetry(handles[1])
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "y")
    assert nixl_agent("told").agent.captures_telemetry
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "no")
    loud = nixl_agent_config(capture_telemetry=True)
    assert not nixl_agent("told to be quiet", loud).agent.captures_telemetry
    monkeypatch.setenv("NIXL_TELEMETRY_ENABLE", "")
    assert nixl_agent("told nothing", loud).agent.captures_telemetry


def test_wrong_argument_is_a_value_error():
    with pytest.raises(ValueError, match="agent_name must be a text of 1 to 1024 bytes"):
        nixl_agent("")


def test_states_before_and_after(near):
    agent = near.agent
    local, remote = sides_of_itself(near)
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [1])
    with pytest.raises(nixl_bind.nixlNotPostedError):
        agent.check_xfer_state(handle)
    assert agent.query_xfer_backend(handle) == "UCX"
    assert agent.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    agent.release_xfer_handle(handle)
    agent.release_xfer_handle(handle)
    for call in (agent.transfer, agent.check_xfer_state, agent.query_xfer_backend):
        with pytest.raises(nixl_bind.nixlInvalidParamError, match="not released"):
            call(handle)


def itself(near):
    """A write of this agent to itself."""
    source, target = (near.agent.get_xfer_descs(near.blocks()[[i]], "DRAM") for i in (0, 9))
    return near.agent.initialize_xfer("WRITE", source, target, "near")


def test_one_of_many_threads_posts_a_handle(near, monkeypatch):
    """However long a thread takes from its look at the state until it sets it."""
    handle, posted, refused = itself(near), [], []

    def slow():
        time.sleep(0.02)
        return time.monotonic()

    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=slow))
    monkeypatch.setattr(handle.job.remote, "post", posted.append)

    def post(_):
        try:
            near.agent.transfer(handle)
        except nixl_bind.nixlRepostActiveError as error:
            refused.append(error)

    in_threads(8, post)
    assert (len(posted), len(refused)) == (1, 7)


def test_a_handle_that_the_opening_thread_collects(near):
    """It is in a cycle, and found while that thread holds the lock of its transfer."""
    agent = near.agent
    handle = itself(near)
    job, move = handle.job, handle.job._move
    is_dropped = threading.Event()

    def collecting(*arguments, **options):
        assert is_dropped.wait(WAIT_S)
        gc.collect()
        return move(*arguments, **options)

    job._move = collecting
    cycle = [handle]
    cycle.append(cycle)
    agent.transfer(handle)
    handle = cycle = None
    is_dropped.set()
    after = itself(near)
    agent.transfer(after)
    assert settle(agent, after) == "DONE"
    until = time.monotonic() + WAIT_S
    while job._state == "PROC":
        assert time.monotonic() < until
        time.sleep(0.0005)
    assert job.state() == "ERR"


@pytest.mark.parametrize(
    "counts", [[1 << 32], [1 << 31, 1 << 31], [-1], [(1 << 63) - 1, (1 << 63) - 1, 10]]
)
def test_too_many_strided_runs(near, counts):
    runs = np.zeros((len(counts), 5), np.int64)
    runs[:, 4] = counts
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="less than 2.*32 descriptors"):
        near.agent.prep_xfer_dlist("", runs, "DRAM")


def test_descriptors_without_bytes(near):
    rows = near.agent.get_xfer_descs([(near.address, 1, 0), (near.address, 0, 0)], "DRAM")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="descriptor 1 must have bytes"):
        near.agent.initialize_xfer("WRITE", rows, rows, "near")


@pytest.mark.parametrize("name", ["", "x" * 1025, "\ud800", 5])
def test_names_of_agents(name):
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="agent_name must be a text of 1 to"):
        nixl_agent(name)


def test_released_lists(near):
    agent = near.agent
    local, remote = sides_of_itself(near)
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [1])
    agent.release_dlist_handle(local)
    local.release()
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="not released"):
        agent.make_prepped_xfer("READ", local, [0], remote, [1])


def sides_of_itself(near):
    rows = near.blocks()
    return (
        near.agent.prep_xfer_dlist("", rows, "DRAM"),
        near.agent.prep_xfer_dlist(near.name, rows, "DRAM"),
    )


@pytest.mark.parametrize(
    "local, remote, message",
    [
        ([0, NUM_BLOCKS], [0, 1], f"local_indices must be .* got {NUM_BLOCKS} at 1"),
        ([0, 1], [0, -1], "remote_indices must be from 0 .* got -1 at 1"),
        ([0, 1], [0], "got 2 local and 1 remote"),
        ([], [], "at least one, got 0 local and 0 remote"),
        ([0.5], [0], r"local_indices must be \[n\] integers"),
        ([[0]], [0], r"local_indices must be \[n\] integers"),
    ],
)  # fmt: skip
def test_wrong_indices(near, local, remote, message):
    mine, theirs = sides_of_itself(near)
    with pytest.raises(nixl_bind.nixlInvalidParamError, match=message):
        near.agent.make_prepped_xfer("READ", mine, local, theirs, remote)


def test_wrong_sides(near):
    agent = near.agent
    local, remote = sides_of_itself(near)
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="local_xfer_side must be of this"):
        agent.make_prepped_xfer("READ", remote, [0], local, [0])
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="operation must be READ or WRITE"):
        agent.make_prepped_xfer("COPY", local, [0], remote, [0])
    longer = agent.prep_xfer_dlist(near.name, near.blocks(8192), "DRAM")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="4096 bytes local and 8192 bytes"):
        agent.make_prepped_xfer("READ", local, [0], longer, [0])
    mixed = near.blocks()
    mixed[1, 1] = 100
    mixed = agent.prep_xfer_dlist(near.name, mixed, "DRAM")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="descriptor 2 must be as long"):
        agent.make_prepped_xfer("READ", local, [0, 2, 1], mixed, [0, 2, 1])


def test_overlapping_targets_are_refused(near):
    agent = near.agent
    local, remote = sides_of_itself(near)
    handle = agent.make_prepped_xfer("READ", local, [0, 0], remote, [1, 2])
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="overlap"):
        agent.transfer(handle)
        settle(agent, handle)
    agent.release_xfer_handle(handle)


def test_outside_of_registered_memory(near):
    rows = near.blocks()
    rows[3, 0] += 1 << 40
    for name in ("", "near"):
        with pytest.raises(nixl_bind.nixlNotFoundError, match="descriptor 3 must be inside"):
            near.agent.prep_xfer_dlist(name, rows, "DRAM")
    with pytest.raises(nixl_bind.nixlNotFoundError, match="'nobody'"):
        near.agent.prep_xfer_dlist("nobody", near.blocks(), "DRAM")


def test_a_stopped_peer_and_release(monkeypatch):
    """What is under way is cancelled by its release, which does not wait for the peer."""
    from .support import far_agent

    monkeypatch.setenv("UCX_TLS", "tcp")
    with far_agent("far", "tcp") as far, near_agent("near", addressed(SIZE)) as near:
        agent = near.agent
        local, remote = sides(near, far)
        handle = agent.make_prepped_xfer("READ", local, range(8), remote, range(8))
        agent.transfer(handle)
        assert settle(agent, handle) == "DONE"
        far.stop()
        assert agent.transfer(handle) == "PROC"
        with pytest.raises(nixl_bind.nixlRepostActiveError):
            agent.transfer(handle)
        near.memory[:] = 7
        agent.release_xfer_handle(handle)
        other = agent.make_prepped_xfer("READ", local, [9], remote, [9])
        assert agent.transfer(other) == "PROC"
        del other  # a dropped handle is cancelled, too
        gc.collect()
        far.go_on()
        time.sleep(0.3)
        assert (near.memory == 7).all()
        again = agent.make_prepped_xfer("READ", local, [0], remote, [0])
        agent.transfer(again)
        assert settle(agent, again) == "DONE"
        assert (near.memory[:BLOCK] == UNTOUCHED).all() and (near.memory[BLOCK:] == 7).all()


@pytest.mark.parametrize(
    "text, allowed",
    [
        ("all", None),
        ("tcp", ["local", "file", "tcp"]),
        ("sm, cuda_copy,cuda_ipc", ["local", "file", "cuda_ipc", "shm"]),
        ("rc_x,tcp", ["local", "file", "rdma", "tcp"]),
        ("^ib", ["local", "file", "cuda_ipc", "shm", "tcp"]),
        ("", None),
        ("self", ["local", "file"]),
        ("self,tcp", ["local", "file", "tcp"]),
        ("dc_mlx5", ["local", "file", "rdma"]),
        ("ud_mlx5,sm", ["local", "file", "rdma", "shm"]),
        ("^self", None),
    ],
)
def test_transports_of_ucx_tls(text, allowed):
    assert transports_of({"UCX_TLS": text}) == allowed


def test_ucx_tls_that_allows_nothing():
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="UCX_TLS must allow"):
        transports_of({"UCX_TLS": "carrier_pigeon"})
