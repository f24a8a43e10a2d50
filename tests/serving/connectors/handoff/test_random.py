"""Many requests with random fates on either side: what is complete is right, and all is freed."""

import random
import threading
import time

import pytest

from tests.serving.connectors.handoff.rank import Rank, digest_of, settings_of, source_of
from tests.transfer.support import eventually

NUM_REQUESTS, TOKENS, BLOCKS = 24, 75, 5


def prefill(sender: Rank, prompt: str, ids: list[int], fate: str, chance: random.Random) -> None:
    """Compute a prompt, or a part of it; then its pages are someone else's."""
    time.sleep(chance.random() * 0.05)
    sender.sender.offer(prompt, digest_of(prompt), TOKENS)
    stop = 0
    while stop < TOKENS:
        stop = min(TOKENS, stop + chance.choice([16, 32, 48]))
        sender.fill(prompt, ids, 0, stop, TOKENS)
        sender.sender.progress(prompt, stop, {"0": ids})
        time.sleep(chance.random() * 0.01)
        if chance.random() < {"dropped": 0.3, "preempted": 0.3}.get(fate, 0):
            if fate == "dropped":
                sender.sender.drop(prompt, "it was dropped")
            else:
                sender.sender.pause(prompt)
                stop = 0  # it is computed again
            for layer in sender.layers:
                layer[:, ids] = 7.0
            if fate == "dropped":
                return
            fate = ""


def receive(receiver: Rank, sender: Rank, prompt: str, ids: list[int], fate: str, chance) -> None:
    """Receive it; or cancel it, and then its pages are someone else's."""
    time.sleep(chance.random() * 0.05)
    receiver.ask(prompt, source_of(sender), ids, TOKENS)
    if fate == "cancelled":
        time.sleep(chance.random() * 0.05)
        receiver.receiver.cancel(prompt)
        for layer in receiver.layers:
            layer[:, ids] = 9.0


@pytest.mark.parametrize("seed", range(4))
def test_any_fates(seed, soak):
    chance = random.Random(seed)
    for turn in range(20 if soak else 1):
        settings = settings_of(num_slots=chance.choice([1, 2, 4]), slot_bytes=26 << 10)
        options = {"settings": settings, "num_blocks": NUM_REQUESTS * BLOCKS}
        options["transports"] = [chance.choice(["tcp", "shm", "local"])]
        with Rank("sender", **options) as sender, Rank("receiver", **options) as receiver:
            check(sender, receiver, random.Random(f"{seed}.{turn}"))


def check(sender: Rank, receiver: Rank, chance: random.Random) -> None:
    fates: dict[str, tuple[str, str]] = {}
    threads = []
    order = [*range(NUM_REQUESTS)]
    chance.shuffle(order)
    for number in order:
        prompt, ids = f"p{number}", [*range(BLOCKS * number, BLOCKS * (number + 1))]
        fate = chance.choice(["", "", "preempted", "dropped"]), chance.choice(["", "", "cancelled"])
        fates[prompt] = fate
        for action, arguments in (
            (prefill, (sender, prompt, ids[::-1], fate[0])),
            (receive, (receiver, sender, prompt, ids, fate[1])),
        ):
            own = random.Random(chance.random())
            threads.append(threading.Thread(target=action, args=(*arguments, own)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, (there, here) in fates.items():
        number = int(prompt[1:])
        ids = [*range(BLOCKS * number, BLOCKS * (number + 1))]
        error = receiver.result(prompt)
        if here == "cancelled" or error is not None:
            assert here == "cancelled" or there == "dropped", error
        else:
            assert receiver.holds(prompt, ids, TOKENS)
        if here == "cancelled":
            assert (receiver.read(ids, 0, TOKENS) == 9.0).all()
    released: set[str] = set()

    def is_released() -> bool:
        released.update(sender.sender.take_released())
        return released == set(fates)

    assert eventually(is_released)
    assert eventually(lambda: not sender.sender._asks)
    num_slots = receiver.endpoint.settings.num_slots
    assert eventually(lambda: receiver.receiver.num_free_slots == num_slots)
    assert not receiver.receiver._calls and not receiver.receiver._requests
