"""kill -9 at random moments: the contents of the survivor's memory, and what the survivor holds.

``--soak`` makes it 100 rounds; a failed one is identified by its seed, ``Round.of(seed)``.
"""

import contextlib
import os
import sys
import time

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .resources import assert_no_growth, held, settled
from .support import WAIT_S, eventually
from .victim import SIZE, Round, Victim, content, memory_of, victim

OLD, NEW = 0x0F, 0xF0  # keys of content, which differ in every byte
WARM_UP = 4  # rounds, after which what is made once is there


class Survivor:
    """An engine of this process for each transport, and memory of both kinds."""

    def __init__(self):
        self.engines = {name: TransferEngine(transports=[name]) for name in ("tcp", "shm")}
        self.memory = {mapped: memory_of(mapped) for mapped in (True, False)}
        self.regions = {
            (name, mapped): engine.register(memory)
            for name, engine in self.engines.items()
            for mapped, memory in self.memory.items()
        }

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


@pytest.fixture
def survivor():
    made = Survivor()
    yield made
    made.close()


def check(plan: Round, memory: np.ndarray, confirmed: set[int]) -> None:
    """Each byte is old or new, those of confirmed blocks are new, and none outside the blocks."""
    old, new = content(OLD), content(NEW)
    if not plan.survivor_is_target:
        np.testing.assert_array_equal(memory, new)
        return
    may_differ = np.zeros(SIZE, bool)
    for number, (at, num_bytes) in enumerate(plan.blocks):
        block = slice(at, at + num_bytes)
        may_differ[block] = True
        if number in confirmed:
            np.testing.assert_array_equal(memory[block], new[block])
    assert ((memory == old) | (memory == new) & may_differ).all()


def await_end(ticket) -> bool:
    """Whether it was confirmed; if not, the peer was lost."""
    with contextlib.suppress(TransferError):
        ticket.wait(WAIT_S)
        return True
    with pytest.raises(TransferError, match="connection closed by peer|connection refused"):
        ticket.wait()
    return False


def die(plan: Round, other: Victim, engine, region) -> tuple[set[int], object]:
    """Kill the victim at its moment; return the blocks that were confirmed, and the old peer."""
    if plan.victim_asks:
        other.go()
        time.sleep(plan.delay_s)
        other.kill()
        return set(other.told()), None
    peer = engine.open(other.name)
    tickets = plan.start(engine, peer, region.address, other.address)
    time.sleep(plan.delay_s)
    other.kill()
    return {number for number, ticket in enumerate(tickets) if await_end(ticket)}, peer


def go_on(plan: Round, other: Victim, engine, region, peer) -> None:
    """The same again with the restarted victim, this time to the end."""
    if plan.victim_asks:
        other.go()
        told: set[int] = set()
        eventually(lambda: len(told.update(other.told()) or told) == len(plan.blocks))
        return
    with peer, pytest.raises(TransferError, match="the peer was restarted|connection closed"):
        engine.write(peer, [(region.address, other.address, 1)]).wait()
    with engine.open(other.name) as again:
        for ticket in plan.start(engine, again, region.address, other.address):
            ticket.wait()


def run(plan: Round, survivor: Survivor) -> None:
    engine = survivor.engines[plan.transport]
    memory = survivor.memory[plan.mapped]
    region = survivor.regions[plan.transport, plan.mapped]
    here, there = (OLD, NEW) if plan.survivor_is_target else (NEW, OLD)
    memory[:] = content(here)
    to = (engine.name, region.address) if plan.victim_asks else None
    with victim(plan, there, None, to) as other:
        name = None if plan.victim_asks else other.name
        during = held()
        confirmed, peer = die(plan, other, engine, region)
        if plan.victim_asks:
            assert settled(during), "its session has not ended"
        check(plan, memory, confirmed)
    with victim(plan, there, name, to) as restarted:
        go_on(plan, restarted, engine, region, peer)
        check(plan, memory, set(range(len(plan.blocks))))


def test_random_kills_of_either_side(survivor, soak):
    seed = int.from_bytes(os.urandom(4), "little")
    shared = set(os.listdir("/dev/shm"))
    for number in range(100 if soak else 10):
        plan = Round.of(seed + number)
        sys.stdout.write(f"{plan}\n")
        if number == WARM_UP:
            before = held()
        run(plan, survivor)
    assert settled(before)
    after = held()
    sys.stdout.write(f"after {WARM_UP} rounds: {before}\nafter all: {after}\n")
    assert_no_growth(before, after)
    eventually(lambda: set(os.listdir("/dev/shm")) <= shared)
