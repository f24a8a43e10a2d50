"""What fails is one request, with a reason, in bounded time; and nothing is reused too early."""

import threading
import time

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.kv.token_shard import TokenShard
from mooncake_serving.connectors.handoff import Source, endpoint
from mooncake_serving.connectors.handoff import receiver as receiving
from mooncake_serving.connectors.handoff.messages import (
    CODEC,
    Ask,
    Asking,
    Cancel,
    Chunk,
    Described,
    Ended,
    Grant,
    Spare,
    Want,
)
from mooncake_serving.connectors.handoff.sender import check_groups
from tests.serving.connectors.handoff.rank import (
    Rank,
    digest_of,
    settings_of,
    source_of,
)
from tests.transfer.support import eventually


class Gate:
    """Holds calls of a method until it is opened."""

    def __init__(self, owner, name: str):
        self._inner = getattr(owner, name)
        self.reached, self._open = threading.Event(), threading.Event()
        setattr(owner, name, self)

    def __call__(self, *arguments, **options):
        self.reached.set()
        assert self._open.wait(60)
        return self._inner(*arguments, **options)

    def wait(self) -> None:
        assert self.reached.wait(60)

    def open(self) -> None:
        self._open.set()


def check_serving(sender: Rank, receiver: Rank, prompt: str = "next") -> None:
    """Both serve others as before, by all slots."""
    sender.prefill(prompt, [60, 61, 62], 40)
    receiver.ask(prompt, source_of(sender), [57, 58, 59], 40)
    assert receiver.result(prompt) is None
    assert receiver.holds(prompt, [57, 58, 59], 40)
    sender.released(prompt)
    num_slots = receiver.endpoint.settings.num_slots
    assert eventually(lambda: receiver.receiver.num_free_slots == num_slots)
    assert not sender.sender._asks


def test_blocks_that_no_one_asks_for_are_released(pair):
    sender, receiver = pair(lease_s=0.3)
    sender.prefill("a", [1], 10)
    sender.released("a")
    receiver.ask("a", source_of(sender), [1], 10)
    assert "not asked for within 0.3 s" in receiver.result("a")
    check_serving(sender, receiver)


def test_a_transfer_that_is_never_offered(pair):
    sender, receiver = pair(lease_s=0.3)
    receiver.ask("a", source_of(sender), [1], 10)
    assert "not offered within 0.3 s" in receiver.result("a")
    check_serving(sender, receiver)


def test_a_transfer_that_was_handed_over_is_over(pair):
    sender, receiver = pair()
    check_serving(sender, receiver, "a")
    receiver.ask("a", source_of(sender), [1, 2, 3], 40, request_id="again")
    assert "it was handed over" in receiver.result("again")


@pytest.mark.parametrize("before", [True, False])
def test_a_release_ends_the_lease(pair, before):
    sender, receiver = pair()
    if not before:
        sender.prefill("a", [1], 10)
    receiver.receiver.release(source_of(sender), "a")
    if before:
        assert eventually(lambda: "a" in sender.sender._over)
        sender.prefill("a", [1], 10)
    sender.released("a")
    check_serving(sender, receiver)


@pytest.mark.parametrize(
    "ask, reason",
    [
        ({"engine_id": "Q"}, "the engine here is P, not Q"),
        ({"digest": digest_of("b")}, "the prompt here is another one"),
        ({"total": 11}, "the prompt here has 10 tokens, not 11"),
    ],
    ids=["engine", "prompt", "length"],
)
def test_another_engine_or_prompt_is_refused(pair, ask, reason):
    sender, receiver = pair(lease_s=0.5)
    sender.prefill("a", [1], 10)
    source = source_of(sender, engine_id=ask.get("engine_id", "P"))
    options = {"digest": ask["digest"]} if "digest" in ask else {}
    receiver.ask("a", source, [1], ask.get("total", 10), **options)
    assert reason in receiver.result("a")
    assert receiver.read([1], 0, 16).isnan().all()
    sender.released("a")
    check_serving(sender, receiver)


def test_another_model_is_refused():
    with (
        Rank("sender", settings=settings_of(model="m")) as sender,
        Rank("receiver", settings=settings_of(model="n")) as receiver,
    ):
        sender.prefill("a", [1], 10)
        receiver.ask("a", source_of(sender), [1], 10)
        assert "the model here is m, not n" in receiver.result("a")


def test_slots_that_are_too_small_are_named():
    with (
        Rank("sender", settings=settings_of(slot_bytes=1 << 10)) as sender,
        Rank("receiver") as receiver,
    ):
        sender.prefill("a", [1], 10)
        receiver.ask("a", source_of(sender), [1], 10)
        assert "slot_bytes must be at least 12416 on both sides" in receiver.result("a")


@pytest.mark.parametrize("what", ["no rank", "no engine"])
def test_an_engine_that_is_not_there(pair, what):
    sender, receiver = pair()
    gone = Rank("sender")
    name = gone.name
    gone.close()
    source = Source("P", [name]) if what == "no rank" else Source("P", first_rank=name)
    receiver.ask("a", source, [1], 10)
    assert name in receiver.result("a")
    check_serving(sender, receiver)


# --- alive, but without progress ------------------------------------------------------------


def test_a_request_that_gets_no_slot_fails(pair):
    sender, receiver = pair(lease_s=1.0, silence_s=3.0, num_slots=1)
    slots = [*receiver.receiver._free]
    receiver.receiver._free.clear()
    sender.prefill("a", [1], 10)
    receiver.ask("a", source_of(sender), [2], 10)
    error = receiver.result("a")
    assert "for 3 s" in error and "silent" not in error
    sender.released("a")
    with receiver.receiver._state:
        assert not receiver.receiver._wants
        receiver.receiver._give_back(*slots)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_peer_that_lives_and_does_nothing(pair, side):
    sender, receiver = pair(lease_s=1.0, silence_s=3.0)
    if side == "sender":
        sender.sender._next = lambda: None
    else:
        receiver.endpoint._handlers[Want] = lambda *_: None
    sender.prefill("a", [1], 10)
    receiver.ask("a", source_of(sender), [2], 10)
    error = receiver.result("a")
    assert "for 3 s" in error and "silent" not in error
    sender.released("a")
    assert eventually(lambda: receiver.receiver.num_free_slots == 4)


def test_waiting_for_the_prefill_is_no_lack_of_progress(pair):
    sender, receiver = pair(lease_s=1.0, silence_s=3.0)
    sender.sender.offer("a", digest_of("a"), 64)
    receiver.ask("a", source_of(sender), [1, 2, 3, 4], 64)
    sender.fill("a", [1, 2], 0, 32, 64)
    sender.sender.progress("a", 32, {"0": [1, 2]})
    assert eventually(lambda: receiver.receiver._requests["a"].calls[0].missing["0", 0].sum() == 6)
    time.sleep(3.5)
    assert not receiver.receiver.take_results()
    sender.prefill("a", [1, 2, 3, 4], 64, offer=False)
    assert receiver.result("a") is None


@pytest.mark.parametrize("message", [Want, Grant])
def test_more_slots_than_are_wanted(pair, message):
    sender, receiver = pair()
    receiver.ask("a", source_of(sender), [1], 10)
    sender.sender.offer("a", digest_of("a"), 10)
    assert eventually(lambda: sender.sender._transfers["a"].asks)
    [ask] = sender.sender._transfers["a"].asks
    if message is Want:
        receiver.receiver._free.clear()
        for _ in range(10):
            receiver.receiver._take_want(sender.name, Want(ask.ask.number))
        assert len(receiver.receiver._wants) == 2
    else:
        sender.sender._take_grant(receiver.name, Grant(ask.ask.number, 0, 1 << 40))
        assert not ask.slots and ask.num_wanted == 0


# --- slots of a sender that does not answer -------------------------------------------------


@pytest.fixture
def frozen(pair, monkeypatch):
    """Makes a sender that has got a slot and says nothing since, and the receiver."""
    monkeypatch.setattr(receiving, "REPLACE_S", 0.1)
    monkeypatch.setattr(receiving, "RETRY_S", 0.2)

    def make(**settings) -> tuple[Rank, Rank]:
        sender, receiver = pair(num_slots=2, **settings)
        for kind in (Grant, Cancel, Asking):
            sender.endpoint._handlers[kind] = lambda *_: None
        sender.endpoint._ticks.clear()
        sender.prefill("a", [1, 2], 32)
        receiver.ask("a", source_of(sender), [1, 2], 32)
        assert eventually(lambda: receiver.receiver.num_free_slots == 1)
        return sender, receiver

    return make


def test_slots_are_replaced_long_before_the_lease_ends(frozen):
    _, receiver = frozen()
    receiver.receiver.cancel("a")
    assert eventually(lambda: receiver.receiver.num_free_slots == 2)
    [fenced] = receiver.receiver._fenced.values()
    assert len(fenced.retired) == 1


def test_a_slot_whose_replacement_fails_is_tried_again(frozen):
    _, receiver = frozen()
    new_slot, failed = receiver.receiver._new_slot, threading.Event()

    def fail():
        failed.set()
        raise MemoryError("there is none")

    receiver.receiver._new_slot = fail
    receiver.receiver.cancel("a")
    assert failed.wait(60)
    with Rank("sender") as other:  # it goes on meanwhile
        other.prefill("b", [1], 10)
        receiver.ask("b", source_of(other), [3], 10)
        assert receiver.result("b") is None
    assert receiver.receiver.num_free_slots == 1
    receiver.receiver._new_slot = new_slot
    assert eventually(lambda: receiver.receiver.num_free_slots == 2)


def test_a_region_that_is_long_in_use_delays_no_step(frozen):
    _, receiver = frozen()
    closing, go_on = threading.Event(), threading.Event()

    class InUse:
        def __init__(self, region):
            self._region, self._is_first = region, True

        def close(self):
            if self._is_first:
                self._is_first = False
                closing.set()
                assert go_on.wait(60)
                raise TimeoutError
            self._region.close()

    slots = receiver.receiver._slots
    receiver.receiver._slots = [(memory, InUse(region)) for memory, region in slots]
    receiver.receiver.cancel("a")
    assert closing.wait(60)
    assert receiver.receiver.num_free_slots == 2
    receiver.receiver.take_results()
    go_on.set()


def test_memory_set_aside_is_bounded_and_freed_in_the_end(frozen, monkeypatch):
    sender, receiver = frozen()
    receiver.receiver.cancel("a")
    for prompt in "bcdef":  # it takes one slot after the other
        sender.prefill(prompt, [1, 2], 32)
        receiver.ask(prompt, source_of(sender), [1, 2], 32)
        time.sleep(0.3)
        receiver.receiver.cancel(prompt)
    time.sleep(0.5)
    calls = [*receiver.receiver._fenced.values()]
    assert sum(len(call.retired) for call in calls) == 2
    monkeypatch.setattr(receiving, "FORGET_S", 0.1)
    monkeypatch.setattr(receiver.endpoint, "send", lambda *_, **__: None)
    for _ in range(100):
        error = TransferError(sender.name, "no route", kind=FailureKind.UNREACHABLE)
        receiver.receiver._peer_failed(sender.name, error, None)
        time.sleep(0.05)
        if not receiver.receiver._fenced:
            break
    assert not receiver.receiver._fenced
    assert receiver.receiver.num_free_slots == 2


# --- a message is not sent ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["too long", "not text", "queue full"])
def test_a_message_that_is_not_sent_is_one_requests_failure(pair, what):
    sender, receiver = pair()
    receiver.ask("good", source_of(sender), [1], 10)
    assert eventually(lambda: "good" in sender.sender._early)
    if what == "queue full":
        send = receiver.endpoint._send_now

        def refuse(name, message):
            if isinstance(message, Ask):
                raise TransferError(name, "its queue is full", kind=FailureKind.BUSY)
            send(name, message)

        for line in receiver.endpoint._lines.values():
            line._send = refuse
    digest = b"x" * (70 << 10) if what == "too long" else b"x"
    transfer_id = "\ud800" if what == "not text" else "bad"
    receiver.receiver.receive("bad", source_of(sender), transfer_id, digest, {"0": [2]}, 10)
    assert receiver.result("bad")
    sender.prefill("good", [1], 10)
    assert receiver.result("good") is None
    assert receiver.holds("good", [1], 10)


def test_peers_that_messages_go_to_are_bounded(pair, monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_LINES", 4)
    sender, receiver = pair()
    receiver.ask("good", source_of(sender), [1], 10)
    assert eventually(lambda: "good" in sender.sender._early)
    names = [f"127.0.0.1:{port}" for port in range(2, 102)]
    before = threading.active_count()
    receiver.receiver.release(Source("P", names), "a")
    assert threading.active_count() <= before + 3
    receiver.ask("bad", Source("P", ["127.0.0.1:1"]), [2], 10)
    assert "other peers" in receiver.result("bad")
    sender.prefill("good", [1], 10)
    assert receiver.result("good") is None


def test_an_engine_that_has_another_name_for_itself(pair):
    sender, receiver = pair()
    sender.sender.set_ranks([sender.name])
    sender.prefill("a", [1], 10)
    first = f"localhost:{sender.name.rpartition(':')[2]}"
    receiver.ask("a", Source("P", first_rank=first), [2], 10)
    assert receiver.result("a") is None
    assert receiver.holds("a", [2], 10)


# --- several receivers ask for one transfer -------------------------------------------------


def test_a_receiver_that_gave_up_early_does_not_spoil_the_next_try(pair):
    sender, receiver = pair()
    receiver.ask("a", source_of(sender), [1, 2], 32)
    assert eventually(lambda: "a" in sender.sender._early)
    receiver.receiver.cancel("a")
    assert "cancelled" in receiver.result("a")
    assert eventually(lambda: not sender.sender._asks)
    receiver.ask("a", source_of(sender), [3, 4], 32, request_id="again")
    assert eventually(lambda: "a" in sender.sender._early)
    sender.prefill("a", [1, 2], 32)
    assert receiver.result("again") is None
    assert receiver.holds("a", [3, 4], 32)
    sender.released("a")


# --- a chunk is damaged -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("data", "checksum"),
        ("heads", "without some of its heads"),
        ("tokens", "all tokens, got token_shard (0, 2, 1)"),
    ],
)
def test_a_damaged_chunk_is_that_requests_failure(pair, where, reason):
    sender, receiver = pair(num_slots=1)
    pack = sender.sender._pack

    def damage(packer, staging, pieces, ids, *rest):
        header = pack(packer, staging, pieces, ids, *rest)
        if 7 in ids["0"]:
            if where == "data":
                staging[100] ^= 1
            elif where == "tokens":  # of a context-parallel rank
                object.__setattr__(header.groups[0], "token_shard", TokenShard(0, 2, 1))
            else:  # another part of the model than it is
                packed = header.groups[0].packed
                object.__setattr__(packed.views[0], "first_head", 4)
        return header

    sender.sender._pack = damage
    sender.prefill("good", [1, 2], 32)
    sender.prefill("bad", [6, 7], 32)
    for prompt, ids in (("good", [1, 2]), ("bad", [3, 4])):
        receiver.ask(prompt, source_of(sender), ids, 32)
    assert receiver.result("good") is None
    assert receiver.holds("good", [1, 2], 32)
    assert reason in receiver.result("bad")
    check_serving(sender, receiver)


def test_a_sender_that_leaves_blocks_out(pair):
    sender, receiver = pair()
    take = type(sender.sender)._next

    def leave_out(own):
        work = take(own)
        if work is not None and (places := work[1].places)["0"].stop > 2:
            places["0"] = range(places["0"].start, places["0"].stop - 1)
        return work

    sender.sender._next = lambda: leave_out(sender.sender)
    sender.prefill("a", [1, 2, 3, 4], 64)
    receiver.ask("a", source_of(sender), [1, 2, 3, 4], 64)
    assert "blocks are missing" in receiver.result("a")


# --- either side gives up ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["not offered", "offered", "streaming", "packing", "writing"])
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_either_side_gives_up(pair, stage, side):
    sender, receiver = pair(num_slots=2)
    ids, there = [1, 2, 3, 4], [5, 6, 7, 8]
    gate = None
    receiver.ask("a", source_of(sender), there, 64)
    if stage != "not offered":
        sender.sender.offer("a", digest_of("a"), 64)
    if stage == "streaming":
        sender.fill("a", ids, 0, 32, 64)
        sender.sender.progress("a", 32, {"0": ids})
        assert eventually(lambda: not receiver.read(there, 0, 32).isnan().any())
    elif stage in ("packing", "writing"):
        owner, name = {
            "packing": (sender.sender, "_pack"),
            "writing": (sender.endpoint, "write"),
        }[stage]
        gate = Gate(owner, name)
        sender.prefill("a", ids, 64, offer=False)
        gate.wait()
    if side == "receiver":
        receiver.receiver.cancel("a")  # no matter what the sender does
        assert "cancelled" in receiver.result("a", 0.0)
        for layer in receiver.layers:
            layer.fill_(float("nan"))
        if gate is not None:
            assert receiver.receiver.num_free_slots == 1  # it may still be written
            gate.open()
        assert eventually(lambda: not sender.sender._asks)
        if stage not in ("packing", "writing"):
            sender.prefill("a", ids, 64, offer=stage == "not offered")
        sender.released("a")  # long before the lease ends
    else:
        over = threading.Event()

        def drop():
            sender.sender.drop("a", "the client has gone")
            over.set()

        dropping = threading.Thread(target=drop)
        dropping.start()
        if stage == "packing":  # its blocks are still read
            assert not over.wait(0.2)
            gate.open()
        dropping.join()
        for layer in sender.layers:  # they are someone else's now
            layer.fill_(7.0)
        if stage == "writing":
            assert not receiver.receiver.take_results()
            assert receiver.receiver.num_free_slots == 1
            gate.open()
            assert receiver.result("a") is None  # it was all packed before
            assert receiver.holds("a", there, 64)
        else:
            assert "the client has gone" in receiver.result("a")
        if stage != "not offered":
            sender.released("a")
    assert eventually(lambda: receiver.receiver.num_free_slots == 2)
    if side == "receiver":  # its blocks are someone else's now
        assert receiver.read(there, 0, 64).isnan().all()
    assert not (receiver.read(there, 0, 64) == 7.0).any()
    check_serving(sender, receiver)


def test_cancel_waits_until_a_chunk_is_unpacked(pair):
    sender, receiver = pair()
    gate = Gate(receiver.receiver, "_unpack")
    sender.prefill("a", [1, 2], 32)
    receiver.ask("a", source_of(sender), [3, 4], 32)
    gate.wait()
    over = threading.Event()

    def cancel():
        receiver.receiver.cancel("a")
        over.set()

    cancelling = threading.Thread(target=cancel)
    cancelling.start()
    assert not over.wait(0.2)
    assert not receiver.receiver.take_results()
    gate.open()
    cancelling.join()
    assert "cancelled" in receiver.result("a", 0.0)
    check_serving(sender, receiver)


def test_a_slot_is_not_used_again_while_a_cancelled_request_may_write_to_it(pair):
    sender, receiver = pair(num_slots=1)
    gate = Gate(sender.endpoint, "write")
    sender.prefill("a", [1, 2], 32)
    receiver.ask("a", source_of(sender), [3, 4], 32)
    gate.wait()
    receiver.receiver.cancel("a")
    with Rank("sender") as other:
        other.prefill("b", [1, 2], 32)
        receiver.ask("b", source_of(other), [3, 4], 32)
        with pytest.raises(AssertionError, match="has not ended"):
            receiver.result("b", 0.3)
        gate.open()
        assert receiver.result("b") is None
        assert receiver.holds("b", [3, 4], 32)


def test_a_preempted_request_goes_on_from_other_blocks(pair):
    sender, receiver = pair()
    ids, others, there = [1, 2, 3, 4], [11, 12, 13, 14], [5, 6, 7, 8]
    receiver.ask("a", source_of(sender), there, 64)
    sender.sender.offer("a", digest_of("a"), 64)
    sender.fill("a", ids, 0, 32, 64)
    sender.sender.progress("a", 32, {"0": ids[:2]})
    assert eventually(lambda: not receiver.read(there, 0, 32).isnan().any())
    sender.fill("a", ids, 32, 48, 64)
    gate = Gate(sender.sender, "_pack")
    sender.sender.progress("a", 48, {"0": ids[:3]})
    gate.wait()
    paused = threading.Event()
    pausing = threading.Thread(target=lambda: (sender.sender.pause("a"), paused.set()))
    pausing.start()
    assert not paused.wait(0.2)
    gate.open()
    pausing.join()
    for layer in sender.layers:  # they are someone else's now
        layer.fill_(7.0)
    for stop in (16, 32, 64):  # from its beginning
        sender.fill("a", others, 0, stop, 64)
        sender.sender.progress("a", stop, {"0": others})
    assert receiver.result("a") is None
    assert receiver.holds("a", there, 64)
    sender.released("a")
    check_serving(sender, receiver)


def test_a_preempted_request_does_not_keep_slots(pair):
    sender, receiver = pair(num_slots=1)
    sender.sender.offer("a", digest_of("a"), 64)
    receiver.ask("a", source_of(sender), [1, 2, 3, 4], 64)
    assert eventually(lambda: sender.sender._transfers["a"].asks)
    with receiver.receiver._state:  # it cannot answer now
        sender.fill("a", [1, 2], 0, 32, 64)
        sender.sender.progress("a", 32, {"0": [1, 2]})
        sender.sender.pause("a")
    sender.prefill("b", [5, 6], 32)
    receiver.ask("b", source_of(sender), [5, 6], 32)
    assert receiver.result("b") is None  # by the only slot
    sender.prefill("a", [1, 2, 3, 4], 64, offer=False)
    assert receiver.result("a") is None
    assert receiver.holds("a", [1, 2, 3, 4], 64)


def test_closing_either_side_ends_its_requests(pair):
    sender, receiver = pair(lease_s=60.0)
    sender.sender.offer("a", digest_of("a"), 64)
    receiver.ask("a", source_of(sender), [1, 2, 3, 4], 64)
    assert eventually(lambda: sender.sender._transfers["a"].asks)
    sender.sender.close()
    assert "the sender was closed" in receiver.result("a")
    receiver.ask("b", source_of(sender), [1, 2, 3, 4], 64)
    receiver.receiver.close()
    assert "closed" in receiver.result("b", 1.0)


# --- wrong arguments --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, match",
    [
        ({"block_ids": {"1": [1]}}, "block_ids must be of the groups"),
        ({"block_ids": {"0": []}}, r"block_ids\['0'\] must be at least 1, got 0"),
        ({"first_token": 10}, r"first_token must be in \[0, 10\), got 10"),
        ({"first_token": 3}, "first_token must be a multiple of 16, got 3"),
        ({"source": Source("P")}, "source must have ranks or first_rank"),
        ({"source": Source("P" * 513, ["h:1"])}, "engine_id must be at most 512 .*, got 513"),
        ({"source": Source("P", ["h:1"] * 4097)}, "source must have at most 4096 ranks, got 4097"),
        ({"transfer_id": "t" * 513}, "transfer_id must be at most 512 characters, got 513"),
    ],
)
def test_wrong_arguments_of_receive(pair, change, match):
    sender, receiver = pair()
    options = {"source": source_of(sender), "block_ids": {"0": [1]}, "first_token": 0, **change}
    with pytest.raises(InvalidArgument, match=match):
        receiver.receiver.receive(
            "a", options["source"], options.get("transfer_id", "a"), b"", options["block_ids"], 10,
            first_token=options["first_token"],
        )  # fmt: skip
    assert not receiver.receiver.take_results()


def test_a_transfer_is_offered_once(pair):
    sender, _ = pair()
    sender.sender.offer("a", b"", 1)
    with pytest.raises(InvalidArgument, match="of no current transfer, got 'a'"):
        sender.sender.offer("a", b"", 1)


@pytest.mark.parametrize(
    "message",
    [
        b"no message",
        CODEC.encode(Grant(7, 0, 1 << 40)),
        CODEC.encode(Chunk(7, 0, b"no header")),
        CODEC.encode(Spare(7, 0)),
        CODEC.encode(Want(7)),
        CODEC.encode(Cancel(7)),
        CODEC.encode(Ended(7, "")),
        CODEC.encode(Described(7, "P", [])),
    ],
    ids=lambda message: message[4:8].hex(),
)
def test_messages_that_no_one_waits_for_change_nothing(pair, message):
    sender, receiver = pair()
    with mk.TransferEngine() as stranger:
        for rank in (sender, receiver):
            stranger.write(stranger.open(rank.name), (), notify=message).wait()
        check_serving(sender, receiver)


def test_another_rank_cannot_end_or_fill_a_request(pair):
    sender, receiver = pair()
    gate = Gate(sender.endpoint, "write")
    sender.prefill("a", [1, 2], 32)
    receiver.ask("a", source_of(sender), [3, 4], 32)
    gate.wait()
    [(_, number)] = receiver.receiver._calls
    [slot] = next(iter(receiver.receiver._calls.values())).granted
    with mk.TransferEngine() as stranger:
        to_receiver, to_sender = (stranger.open(rank.name) for rank in (receiver, sender))
        for message in (Ended(number, "no"), Chunk(number, slot, b""), Spare(number, slot)):
            stranger.write(to_receiver, (), notify=CODEC.encode(message)).wait()
        stranger.write(to_sender, (), notify=CODEC.encode(Cancel(number))).wait()
        gate.open()
        assert receiver.result("a") is None
        assert receiver.holds("a", [3, 4], 32)


@pytest.mark.parametrize(
    ("kind", "token_shard", "message"),
    [
        ("encoder", None, "^Sender: groups must not be of an encoder, got 'a'"),
        ("full", (1, 2, 4), r"must have all tokens of a request, got 'a' with .* \(1, 2, 4\)"),
    ],
)
def test_groups_that_cannot_be_handed_over_are_refused(kind, token_shard, message):
    view = mk.KVView(torch.zeros(2, 4, 8), "block token dim")
    group = mk.CacheGroup("a", view, kind, token_shard=token_shard)
    with pytest.raises(InvalidArgument, match=message):
        check_groups("Sender", mk.CacheGroups(group))
