"""NICs that fail under the engine: others take over, or the error says all that is known."""

import errno
import time

import numpy as np
import pytest

from mooncake_kernels import TransferError
from mooncake_kernels.transfer import TransferEngine

from .engines import ALL, UNTOUCHED, engines, topology_of
from .pairs import addressed

MIB = 1 << 20


def in_blocks(size: int, block: int = 4096) -> list[tuple[int, int, int]]:
    """The same bytes, in an order that joins no neighbours."""
    count = size // block
    return [(block * i, block * (count - 1 - i), block) for i in range(count)]


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("skip", [0, 1, 40])
@pytest.mark.parametrize("status", ["local protection error", "remote access error"])
def test_failed_queue_pair_is_retried(world, direction, skip, status):
    with engines(MIB) as pair:
        world.fail_work(status, skip=skip)
        pair.move(direction, in_blocks(MIB), notify=b"done")
        assert pair.far.receive_notifications(10.0) == [(pair.near.name, b"done")]
        pair.move(direction, in_blocks(MIB))
        paths = pair.near.stats()["paths"][pair.far.name].values()
        is_failure = status != "remote access error"  # then other keys may help
        assert sum(path["num_failures"] for path in paths) == is_failure
        assert sum(path["num_retries"] for path in paths) >= 1


@pytest.mark.parametrize("verb", ["ibv_post_send", "ibv_poll_cq", "ibv_req_notify_cq"])
def test_transfer_survives_a_nic_with_failing_verbs(world, verb):
    with engines(MIB) as pair:
        world.fail(verb, errno.EIO, device="fake0", count=1 << 20)
        for _ in range(3):
            pair.move("write", in_blocks(MIB))


@pytest.mark.parametrize("direction", ["write", "read"])
def test_silent_nic_is_taken_over_by_others(world, direction):
    """Others take over what it was given, after some seconds, and it is tried again later."""
    with engines(MIB) as pair:
        pair.move(direction, in_blocks(MIB))
        world.set_option("stalled", 0b0001)
        pair.move(direction, in_blocks(MIB), deadline_s=60.0)
        paths = pair.near.stats()["paths"][pair.far.name]
        failures = {name: path["num_failures"] for name, path in paths.items()}
        assert (failures["fake0"], sum(failures.values())) == (1, 1)
        world.set_option("stalled", 0)
        pair.move(direction, in_blocks(MIB))


def test_nic_gone_silent_during_flush_keeps_data_before_notification(world):
    """What it has written is visible before the notification, since it was taken down."""
    with engines(MIB) as pair:
        with world.held() as let:
            ticket = pair.write(in_blocks(MIB), notify=b"done")
            time.sleep(0.2)
            world.set_option("stalled", 0b0001)
            let(-1)
            ticket.wait()
        assert pair.far.receive_notifications(10.0) == [(pair.near.name, b"done")]
        np.testing.assert_array_equal(pair.there[-4096:], pair.here[:4096])


def test_all_nics_silent_times_out_and_recovers(world):
    with engines(MIB) as pair:
        world.set_option("stalled", 0b0011)
        with pytest.raises(TransferError, match=r"deadline of 7 s passed") as error:
            pair.write([(0, 0, MIB)], deadline_s=7.0).wait()
        assert error.value.num_bytes_done == 0
        world.set_option("stalled", 0)
        pair.move("write", in_blocks(MIB))


@pytest.mark.parametrize("verb", ["ibv_create_cq", "ibv_create_qp", "ibv_modify_qp"])
@pytest.mark.parametrize("nic", ["fake0", "fake2"])
def test_transfer_survives_a_nic_that_cannot_connect(world, verb, nic):
    """At one end, then at the other."""
    world.fail(verb, errno.ENOMEM, device=nic, count=1 << 20)
    with engines() as pair:
        pair.move("write", [(0, 0, 1 << 16)])
        pair.move("read", [(0, 0, 1 << 16)])


def test_down_port_is_retried(world):
    world.set_port(0, state="DOWN")
    with engines() as pair:
        pair.move("write", [(0, 0, 1 << 16)])
        assert world.live()["queue pair"] == 2
        world.set_port(0, state="ACTIVE")
        deadline = time.monotonic() + 20
        while world.live()["queue pair"] < 4:
            assert time.monotonic() < deadline
            pair.move("write", [(0, 0, 100)])
            time.sleep(0.05)


def test_down_nic_of_the_peer_is_replaced(world):
    """Both of ours go on, with the one that is left there."""
    world.set_port(2, state="DOWN")
    with engines() as pair:
        pair.move("write", [(0, 0, 1 << 16)])
        assert world.live()["queue pair"] == 4


def test_open_fails_when_no_nic_can_connect(world):
    world.fail("ibv_modify_qp", errno.ETIMEDOUT, count=1 << 20)
    with pytest.raises(TransferError, match=r"ibv_modify_qp: .* Connection timed out"), engines():
        pass


def test_all_nics_fail_and_recover(world):
    with engines() as pair:
        world.fail("ibv_post_send", errno.EIO, count=1 << 20)
        with pytest.raises(TransferError, match="general error") as error:
            pair.write([(0, 0, 1 << 16)]).wait()
        assert error.value.num_bytes_done == 0
        world.reset_rules()
        pair.move("write", [(0, 0, 1 << 16)])


def test_tcp_takes_over_if_allowed(world):
    with engines(transports=["rdma", "tcp"]) as pair:
        world.fail("ibv_post_send", errno.EIO, count=1 << 20)
        pair.move("write", in_blocks(1 << 16), notify=b"by tcp")
        pair.move("read", in_blocks(1 << 16))
        assert pair.far.receive_notifications(10.0) == [(pair.near.name, b"by tcp")]


def test_reregistered_region_is_reached_with_new_keys():
    """The keys that were told are of the old one."""
    with engines() as pair:
        pair.move("write", [(0, 0, 100)])
        pair.far_region.close()
        with pytest.raises(TransferError, match="is not inside a registered region"):
            pair.write([(0, 0, 100)]).wait()
        pair.far_region = pair.far.register(pair.there)
        pair.move("write", [(0, 0, 100)])
        pair.move("read", [(0, 0, 1 << 16)])


def test_reregistered_memory_takes_no_nic_down():
    """Nor keeps other memory from it; the keys are asked for, and it is connected again at once."""
    with engines(near=ALL[:1], far=ALL[2:3], transports=["rdma", "tcp"]) as pair:
        other = pair.far.register(np.zeros(4096, np.uint8))
        for _ in range(5):
            pair.move("write", [(0, 0, 4096)])
            pair.near.write(pair.peer, [(pair.near_region.address, other.address, 4096)]).wait()
            pair.far_region.close()
            pair.far_region = pair.far.register(pair.there)
        paths = pair.near.stats()["paths"][pair.peer.name]
        assert paths["fake0"]["num_bytes_written"] == 10 * 4096
        assert (paths["fake0"]["num_failures"], paths["fake0"]["num_reconnects"]) == (0, 4)


@pytest.mark.parametrize("transports", [["rdma"], ["rdma", "tcp"]])
def test_repeated_access_errors_take_the_nic_down(world, transports):
    """Only once is that put down to its keys."""
    with engines(transports=transports) as pair:
        for _ in range(1000):
            world.fail_work("remote access error")
        if "tcp" in transports:
            pair.move("write", [(0, 0, 1 << 16)])
        else:
            with pytest.raises(TransferError, match="remote access error"):
                pair.write([(0, 0, 1 << 16)]).wait()
        paths = pair.near.stats()["paths"][pair.peer.name]
        assert paths["fake0"]["num_failures"] >= 1
        world.reset_rules()
        pair.move("write", [(0, 0, 1 << 16)])


def test_failed_flush_at_the_peer_still_delivers(world):
    """What its NIC cannot confirm is in its memory once the connection is taken down."""
    with engines(near=ALL[:1], far=ALL[2:3]) as pair:
        pair.move("write", [(0, 0, 4096)])
        world.fail("ibv_poll_cq", errno.EIO, device="fake2", count=1 << 20)
        for i in range(3):
            pair.move("write", [(4096 * i, 0, 4096)], notify=b"done")
            assert pair.far.receive_notifications(10.0) == [(pair.near.name, b"done")]
        paths = pair.near.stats()["paths"][pair.peer.name]
        assert paths["fake0"]["num_failures"] == 3
        assert paths["connection"]["num_failures"] == 0
        assert "on the peer's fake2: ibv_poll_cq" in str(
            pair.near.explain_path(pair.near_region, pair.peer, pair.far_region.address)
        )


def test_explain_path_reports_down_nics(world):
    """Of the connection that requests use, and of the one that is made to find out."""
    with engines(MIB, transports=["rdma", "tcp"]) as pair:

        def explain():
            return pair.near.explain_path(pair.near_region, pair.peer, pair.far_region.address)

        found = explain()
        assert str(found).splitlines()[0].endswith(", by fake0, fake1")
        assert found.reasons[-1].endswith("NIC to NIC: fake0 to fake2, fake1 to fake3")
        world.fail("ibv_post_send", errno.EIO, device="fake0")
        world.fail("ibv_create_qp", errno.ENOMEM, device="fake0", count=1 << 20)
        pair.move("write", in_blocks(MIB))
        found = explain()
        assert found.lanes == ("fake1",)
        assert "fake0 to fake2 (down: ibv_create_qp" in found.reasons[-1]
        assert found.reasons[-2].startswith("requests now do without fake0 to fake")
        world.reset_rules()
        found = explain()  # which repairs nothing
        assert found.lanes == ("fake0", "fake1")
        assert found.reasons[-2].startswith("requests now do without fake0 to fake")
        world.fail("ibv_create_qp", errno.ENOMEM, count=1 << 20)
        found = explain()
        assert (found.method, found.lanes) == ("connection", ("connection",))
        assert found.reasons[-1].startswith("no NIC can be connected: fake0 to fake2 (down: ")


def cannot_register(world, *nics: str) -> None:
    for nic in nics:
        world.fail("ibv_reg_mr_iova2", errno.EIO, device=nic, count=1 << 20)


@pytest.mark.parametrize("transports", [["rdma"], ["rdma", "tcp"], None])
def test_nic_that_cannot_register_is_noted(world, caplog, transports):
    """The others have the memory, and move it."""
    cannot_register(world, "fake1")
    topology = topology_of(ALL[:2])
    with TransferEngine(transports=transports, topology=topology) as engine:
        note = engine.register(np.zeros(4096, np.uint8)).note
        assert note.startswith("not on fake1: ibv_reg_mr: 4096 bytes at ")
        assert caplog.records[-1].cause == note


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("transports", [["rdma"], ["rdma", "tcp"]])
@pytest.mark.parametrize(
    "without", [["fake1"], ["fake0"], ["fake3"], ["fake0", "fake3"], ["fake1", "fake3"]]
)
def test_memory_on_some_nics(world, transports, direction, without):
    """At either end; a rail between those that have it is made if there is none."""
    cannot_register(world, *without)
    with engines(MIB, transports=transports) as pair:
        pair.move(direction, in_blocks(MIB), notify=b"done")
        paths = pair.near.stats()["paths"][pair.peer.name]
        counter = "num_bytes_written" if direction == "write" else "num_bytes_read"
        used = {nic: counters[counter] for nic, counters in paths.items() if counters[counter]}
        assert sum(used.values()) == MIB
        assert set(used) <= set(ALL[:2]) - set(without)


def test_only_nic_with_the_memory_fails_the_transfer(world):
    """It is tried again, though another one is up."""
    cannot_register(world, "fake1")
    with engines() as pair:
        world.fail("ibv_post_send", errno.EIO, device="fake0")
        pair.move("write", [(0, 0, 1 << 16)])
        world.fail("ibv_post_send", errno.EIO, device="fake0", count=1 << 20)
        with pytest.raises(TransferError, match="general error"):
            pair.write([(0, 0, 1 << 16)]).wait()


def apart(world) -> None:
    """Each NIC here can be connected with one there only: fake0 with fake2, fake1 with fake3."""
    for index in (1, 3):
        world.set_port(index, link_layer="InfiniBand", lid=index + 1)


def registered(world, engine, without: str):
    """Memory that all NICs but that one have."""
    cannot_register(world, without)
    region = engine.register(np.zeros(1 << 16, np.uint8))
    world.reset_rules()
    return region


def move_beside(pair, row, match: str) -> None:
    """That row is refused each time; requests before and after it move, by the rails there are."""
    before = pair.near.stats()["paths"][pair.peer.name]
    good, bad = [], []
    for _ in range(30):
        good.append(pair.write([(0, 0, MIB)]))
        bad.append(pair.near.write(pair.peer, [row]))
    for ticket in bad:
        with pytest.raises(TransferError, match=match) as error:
            ticket.wait()
        assert error.value.num_bytes_done == 0
    for ticket in good:
        ticket.wait()
    np.testing.assert_array_equal(pair.there, pair.here)
    after = pair.near.stats()["paths"][pair.peer.name]
    assert after["fake1"]["num_reconnects"] == before["fake1"]["num_reconnects"]


def test_memory_without_a_common_rail_fails(world):
    apart(world)
    with engines(MIB) as pair:
        here = registered(world, pair.near, without="fake1")
        there = registered(world, pair.far, without="fake2")
        pair.move("write", [(0, 0, MIB)])
        row = (here.address, there.address, 4096)
        move_beside(pair, row, "no NIC with the memory here reaches one with it there")


@pytest.mark.parametrize("verb", ["ibv_post_send", "ibv_poll_cq"])
def test_memory_on_a_failed_nic_fails_without_affecting_others(world, verb):
    """Whether at once or later, beside what it was given of other requests."""
    with engines(MIB) as pair:
        here = registered(world, pair.near, without="fake1")
        there = pair.far.register(np.zeros(1 << 16, np.uint8))
        world.fail(verb, errno.EIO, device="fake0", count=1 << 20)
        pair.move("write", [(0, 0, MIB)])
        move_beside(pair, (here.address, there.address, 4096), r"ibv_poll_cq|general error")


def test_rail_is_restored_for_memory_on_a_recovered_nic(world):
    """All have moved to the peer's other NIC; one is made to that which has the memory."""
    world.set_port(2, state="DOWN")
    with engines(MIB) as pair:
        there = registered(world, pair.far, without="fake3")
        row = (pair.near_region.address, there.address, 4096)
        pair.move("write", [(0, 0, MIB)])
        with pytest.raises(TransferError, match="fake2"):
            pair.near.write(pair.peer, [row]).wait()
        world.set_port(2, state="ACTIVE")
        pair.near.write(pair.peer, [row]).wait()
        pair.move("write", [(0, 0, MIB)])


def test_error_is_of_a_nic_that_has_the_memory(world):
    """Not of one that is down, too, but could not move it."""
    apart(world)
    with engines() as pair:
        here = registered(world, pair.near, without="fake0")
        there = registered(world, pair.far, without="fake3")
        world.fail("ibv_create_qp", errno.ENOMEM, device="fake0", count=1 << 20)
        for _ in range(2):
            with pytest.raises(TransferError, match="no NIC with the memory here reaches one"):
                pair.near.write(pair.peer, [(here.address, there.address, 4096)]).wait()


@pytest.mark.parametrize("transports", [["rdma"], ["rdma", "tcp"]])
def test_notification_survives_close_of_the_source_region(transports):
    """A notification needs none of the memory that was written from."""
    with engines(transports=transports) as pair:
        with pair.near.register(np.zeros(4096, np.uint8)) as source:
            row = [(source.address, pair.far_region.address, 4096)]
            pair.near.write(pair.peer, row).wait()
        pair.near.write(pair.peer, [], notify=b"done").wait()
        assert pair.far.receive_notifications(10.0) == [(pair.near.name, b"done")]
        pair.move("write", [(0, 0, 1000)])
        paths = pair.near.stats()["paths"][pair.peer.name]
        assert sum(path["num_failures"] for path in paths.values()) == 0
        assert sum(paths[nic]["num_bytes_written"] for nic in ALL[:2]) == 5096


def test_region_reregistered_with_larger_size():
    with engines() as pair:
        pair.far_region.close()
        with pair.far.register(pair.there[:1000]):
            pair.move("write", [(0, 0, 1000)])
        pair.far_region = pair.far.register(pair.there)
        pair.move("write", [(5000, 5000, 100)])
        pair.move("write", [(0, 0, 1 << 16)])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("far_region", "is not inside a registered region"),
        ("far", r"connection (refused|closed by peer|reset)"),
    ],
)
def test_closing_a_region_or_engine_mid_write_stops_the_write(world, what, message):
    with engines() as pair:
        with world.held():
            ticket = pair.write([(0, 0, 1 << 16)])
            time.sleep(0.1)
            before = pair.there.copy()
            getattr(pair, what).close()  # nothing lands from here on
        with pytest.raises(TransferError, match=message):
            ticket.wait()
        np.testing.assert_array_equal(pair.there, before)


@pytest.mark.parametrize("how", ["cancel", "deadline", "close the region", "close the engine"])
def test_ended_read_does_not_touch_memory(world, how):
    with engines() as pair:
        pair.here[:] = UNTOUCHED
        with world.held():
            ticket = pair.read([(0, 0, 1 << 16)], deadline_s=0.3 if how == "deadline" else 60)
            time.sleep(0.1)
            if how == "cancel":
                assert ticket.cancel()
            elif how == "close the region":
                pair.near_region.close()
            elif how == "close the engine":
                pair.near.close()
            with pytest.raises(TransferError):
                ticket.wait()
        time.sleep(0.1)
        assert (pair.here == UNTOUCHED).all()
        if how in ("cancel", "deadline"):
            pair.here[:] = addressed(1 << 16)
            pair.move("write", [(0, 0, 1 << 16)])


def test_request_before_a_failed_one_stays_delivered(world):
    """What is confirmed of a request that fails is told."""
    with engines(MIB, near=ALL[:1], far=ALL[1:2]) as pair:
        pair.move("write", [(0, 0, MIB // 2)])
        world.fail("ibv_post_send", errno.EIO, count=1 << 20)
        with pytest.raises(TransferError):
            pair.write([(MIB // 2, MIB // 2, MIB // 2)]).wait()
        assert (pair.there[: MIB // 2] == pair.here[: MIB // 2]).all()
