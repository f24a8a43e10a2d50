"""Two engines that ask for one transfer: its blocks stay until neither needs them."""

import time
from contextlib import ExitStack

import pytest

from tests.serving.connectors.handoff.rank import Rank, digest_of, source_of
from tests.transfer.support import eventually


@pytest.mark.parametrize("first", ["cancelled", "refused", "served"])
def test_blocks_stay_while_another_receiver_asks_for_them(pair, first):
    sender, receiver = pair(slot_bytes=16 << 10)
    with Rank("receiver", settings=receiver.endpoint.settings) as other:
        ids = [*range(10)]
        slots = [*other.receiver._free]
        other.receiver._free.clear()  # it has no slot at the moment
        sender.sender.offer("a", digest_of("a"), 160)
        digest = digest_of("b" if first == "refused" else "a")
        receiver.ask("a", source_of(sender), ids, 160, digest=digest)
        if first == "cancelled":
            assert eventually(lambda: sender.sender._transfers["a"].asks)
            receiver.receiver.cancel("a")
            assert eventually(lambda: not sender.sender._asks)
        other.ask("a", source_of(sender), ids, 160)
        assert eventually(lambda: any(key[0] == other.name for key in sender.sender._asks))
        sender.fill("a", ids, 0, 160, 160)
        sender.sender.progress("a", 160, {"0": ids})
        assert (receiver.result("a") is None) == (first == "served")
        time.sleep(0.3)
        assert not sender.sender.take_released()
        with other.receiver._state:
            other.receiver._give_back(*slots)
        assert other.result("a") is None
        assert other.holds("a", ids, 160)
        sender.released("a")


@pytest.mark.parametrize("fate", ["asks for the rest", "is gone", "has cancelled"])
def test_two_engines_of_two_ranks_receive_one_transfer(pair, fate):
    """The first rank of each is done before the second one of either asks."""
    sender, receiver = pair(silence_s=1.0)
    with ExitStack() as stack:
        ranks = {
            (name, rank): stack.enter_context(
                Rank("receiver", shard=(rank, 2), settings=receiver.endpoint.settings)
            )
            for name in "DE"
            for rank in range(2)
        }

        def ask(name: str, rank: int) -> Rank:
            one = ranks[name, rank]
            one.ask("a", source_of(sender), [1, 2], 32, receiver_id=name)
            return one

        def received(name: str, rank: int) -> bool:
            one = ask(name, rank)
            return one.result("a") is None and one.holds("a", [1, 2], 32)

        sender.prefill("a", [5, 6], 32)
        assert received("D", 0)
        if fate == "asks for the rest":
            assert received("E", 0)
        else:
            other = ranks["E", 0]
            with other.receiver._state:
                other.receiver._free.clear()  # it waits for a slot
            ask("E", 0)
            assert eventually(lambda: len(sender.sender._asks) == 1)
            if fate == "has cancelled":
                other.receiver.cancel("a")
            else:
                other.endpoint._ticks.clear()  # it says nothing any more
            assert eventually(lambda: not sender.sender._asks)
        time.sleep(0.3)
        assert not sender.sender.take_released()
        assert received("D", 1)
        if fate == "asks for the rest":
            time.sleep(0.3)
            assert not sender.sender.take_released()
            assert received("E", 1)
        elif fate == "has cancelled":
            assert eventually(lambda: not sender.sender._asks)
            ask("E", 1).receiver.cancel("a")
        sender.released("a")
