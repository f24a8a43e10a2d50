"""Questions about objects with wrong arguments."""

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import ObjectStatus, TransferEngine

from .objects import (
    DONE,
    content,
    here_fixture,  # noqa: F401
    kept_fixture,  # noqa: F401
    key,
    keys,
    place,
)
from .support import UNTOUCHED, untouched


@pytest.mark.parametrize("count", [0, 1025])
@pytest.mark.parametrize("call", ["read_objects", "write_objects", "remove_objects"])
def test_key_count_limits(kept, call, count):
    arguments = [[[]] * count] if call == "write_objects" else []
    message = f"{call}: keys must be 1 to 1024, got {count}"
    with pytest.raises(InvalidArgument, match=message):
        getattr(kept.near, call)(kept.peer, [key(1)] * count, *arguments)


def test_places_must_match_the_object_size(kept):
    small, memory = untouched(5), untouched(100_000)
    with kept.ask(1) as reply:
        for places, message in (
            ([], "places must be 1, got 0"),
            ([[], []], "places must be 1, got 2"),
            ([place(small)], "places must be of the 100000 bytes that are sent, got 5"),
            ([[*place(memory), *place(small)]], "the 100000 bytes that are sent, got 100005"),
        ):
            with pytest.raises(InvalidArgument, match=f"receive: .*{message}"):
                reply.receive(places, verify=True)
        with pytest.raises(InvalidArgument, match="receive: deadline_s must be"):
            reply.receive([place(memory)], verify=True, deadline_s=-1)
        assert (memory == UNTOUCHED).all() and (small == UNTOUCHED).all()
        assert reply.receive([place(memory)], verify=True).all()  # it was not used up
        for again in ([[]], [place(memory)]):
            with pytest.raises(InvalidArgument, match="receive: reply must be open"):
                reply.receive(again, verify=True)
    assert (memory == content(1, 100_000)).all()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("sizes", [[1 << 40], [1 << 63, 1 << 63], [(64 << 20) + 1], [1 << 26, 1]])
def test_sizes_beyond_any_request_are_rejected(kept, sizes, verify):
    """They are added up before a byte is touched."""
    address = place(untouched(5))[0][0]
    message = "write_objects: objects must be at most 67108864 bytes in all"
    places = [(address, size) for size in sizes]
    for objects in ([places], [[one] for one in places]):
        asked = [key(i) for i in range(len(objects))]
        with pytest.raises(InvalidArgument, match=message):
            kept.near.write_objects(kept.peer, asked, objects, verify=verify)


def test_places_with_overflowing_sizes_are_rejected(kept):
    with kept.ask(1) as reply:
        address = place(untouched(5))[0][0]
        wrapped = [[(address, (1 << 64) - 1000), (address, 101_000)]]
        with pytest.raises(InvalidArgument, match="places must be of the 100000 bytes"):
            reply.receive(wrapped, verify=True)


def test_empty_object_takes_no_room(here):
    here.put(1, 0)
    room = untouched(100)
    with here.ask(1) as reply:
        with pytest.raises(InvalidArgument, match="places must be of the 0 bytes"):
            reply.receive([place(room)], verify=True)


def test_closed_reply_cannot_be_received(kept):
    reply = kept.ask(1)
    reply.close()
    reply.close()
    assert reply.statuses.tolist() == [DONE] and reply.object_bytes.tolist() == [100_000]
    with pytest.raises(InvalidArgument, match="receive: reply must be open, got one that was"):
        reply.receive([[]], verify=True)


@pytest.mark.parametrize("wrong", [[-1], [0.5], "abc", [1 << 64], [[0]], [None]])
def test_invalid_offsets_and_sizes_are_rejected(kept, wrong):
    for name in ("offsets", "sizes"):
        with pytest.raises(InvalidArgument, match=f"read_objects: {name} must be"):
            kept.ask(1, **{"offsets": [0], "sizes": [1], name: wrong}).close()


@pytest.mark.parametrize("name", ["offsets", "sizes"])
def test_offsets_and_sizes_must_match_the_keys(kept, name):
    with pytest.raises(InvalidArgument, match="must be as many as keys"):
        kept.ask(1, 1, **{name: [1]})


def test_invalid_pieces_are_rejected(kept):
    for wrong in (None, [None], [[None]], [[(1, -1)]], [(1, 5)], [[(0.5, 1)]]):
        with pytest.raises(InvalidArgument, match="write_objects: objects must be"):
            kept.near.write_objects(kept.peer, keys(1), wrong)


def test_other_invalid_arguments_are_rejected(kept):
    near, peer = kept.near, kept.peer
    for call in (near.read_objects, near.remove_objects):
        name = call.__name__
        with pytest.raises(InvalidArgument, match=f"{name}: keys must be"):
            call(peer, [1, 2, 3])
        with pytest.raises(InvalidArgument, match=f"{name}: peer must be a Peer"):
            call(kept.far, keys(1))
        with pytest.raises(InvalidArgument, match=f"{name}: deadline_s must be"):
            call(peer, keys(1), deadline_s=0)
        with TransferEngine() as other, other.open(kept.far.name) as theirs:
            with pytest.raises(InvalidArgument, match=f"{name}: peer must be a Peer that this"):
                call(theirs, keys(1))
    with pytest.raises(InvalidArgument, match="write_objects: objects must be 1, got 2"):
        near.write_objects(peer, keys(1), [[], []])
    with pytest.raises(InvalidArgument, match="serve: pool must be an ObjectPool or None, got 3"):
        near.serve(3)


def test_flags_must_be_bool(kept):
    with TransferEngine() as engine:
        for name in ("is_all", "may_write", "checksum"):
            with pytest.raises(InvalidArgument, match=f"serve: {name} must be True or False"):
                engine.serve(kept.pool, **{name: "yes"})
    for name in ("sums", "compare"):
        with pytest.raises(InvalidArgument, match=f"read_objects: {name} must be True or False"):
            kept.ask(1, **{name: "yes"})


def test_closed_peer_or_engine_is_rejected():
    with TransferEngine() as far, TransferEngine(transports=["tcp"]) as near:
        pool = ObjectPool.create(1 << 20)
        far.serve(pool)
        peer = near.open(far.name)
        peer.close()
        with pytest.raises(InvalidArgument, match="read_objects: peer must be open"):
            near.read_objects(peer, keys(1))
    for engine in (near, far):
        with pytest.raises(InvalidArgument, match=f"read_objects: the engine {engine.name} is"):
            engine.read_objects(peer, keys(1))
        with pytest.raises(InvalidArgument, match=f"serve: the engine {engine.name} is closed"):
            engine.serve(pool)


def test_closed_service_stops_serving():
    with TransferEngine() as far, TransferEngine(transports=["tcp"]) as near:
        with far.serve(ObjectPool.create(1 << 20)) as first, near.open(far.name) as peer:
            with near.read_objects(peer, keys(1)) as reply:
                assert reply.statuses.tolist() == [ObjectStatus.ABSENT]
            second = far.serve(ObjectPool.create(1 << 20))
            first.close()  # the engine serves another by now
            near.read_objects(peer, keys(1)).close()
            second.close()
            second.close()
            with pytest.raises(Unavailable, match="read_objects: "):
                near.read_objects(peer, keys(1))
    second.close()  # after its engine
