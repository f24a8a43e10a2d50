"""What routers are told of the store, without vLLM: from what the scheduler's side decides and
workers report.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_serving.connectors.tier_store import TierStore
from mooncake_serving.connectors.vllm import block_events
from mooncake_serving.connectors.vllm.block_events import RemovedBlocks, StoredBlocks
from mooncake_serving.connectors.vllm.steps import Report, Stored, object_names
from tests.serving.connectors.test_vllm_scheduler import (
    BLOCK,
    FULL,
    WINDOW,
    Scheduler,
    hashes,
    request,
)

PAGE = np.zeros(1000, np.uint8)


class EventScheduler(Scheduler):
    """A ``StoreScheduler`` that tells of a store, with what workers would put there."""

    def __init__(self, url, groups=(FULL,), **options):
        self.tier = TierStore(url, "n")
        super().__init__(groups, self.tier, events=True, **options)

    def put(self, names, group=0, shards=(0,), epoch=b""):
        names = object_names(epoch, group, names, shards)
        addresses = np.full((len(names), 1), PAGE.ctypes.data, np.uint64)
        return self.tier.put_each(names, addresses, np.full((len(names), 1), PAGE.nbytes))

    def compute(self, r, *tables, done=0):
        """Compute a prompt; return the step's save."""
        self.add(r, *tables, computed=done)
        return self.step(new=[(r, done, r.num_tokens - done)]).save

    def report(self, save, counts, num_workers=1):
        self.side.output(Report({}, {}, {save.number: Stored(num_workers, counts)}), [], [])

    def events(self):
        self.side._events._look_at = 0.0
        return self.side.take_events()

    def close(self):
        self.side.close()
        self.tier.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def make_scheduler(form="shm:{}/kv?size=1MiB", *groups, **options):
        made.append(EventScheduler(form.format(tmp_path), *groups, **options))
        return made[-1]

    yield make_scheduler
    for one in made:
        one.close()


def prompt(name, num_hashes, seed=0):
    """A prompt of blocks, and one token more."""
    made = request(name, num_hashes, seed=seed)
    made.all_token_ids = [100 * seed + i for i in range(made.num_tokens)]
    return made


def stored(r, first, end, group=0):
    """The event of blocks of a prompt."""
    parent = r.block_hashes[first - 1] if first else None
    tokens = r.all_token_ids[first * BLOCK : end * BLOCK]
    return StoredBlocks(r, group, first, r.block_hashes[first:end], parent, tokens)


def test_saved_blocks_are_told_once_with_their_tokens(make):
    one, r = make(), prompt("r", 5)
    save = one.compute(r, [1, 2, 3, 4, 5])
    assert save.is_reported and one.events() == []
    one.put(r.block_hashes)
    one.side.output(Report({save.number: 1}), [], [])
    assert one.events() == [] and one.side.has_waiting, "copied out, and not stored yet"
    one.report(save, [1, 1, 0, 1, 1])
    assert not one.side.has_waiting
    assert one.events() == [stored(r, 0, 2), stored(r, 3, 5)]
    again = prompt("again", 5)
    save = one.compute(again, [1, 2, 3, 4, 5], done=5 * BLOCK)
    one.report(save, [1] * 5)
    assert one.events() == [stored(again, 2, 3)], "and what was missing, now that it is there"


def test_blocks_are_told_when_all_workers_have_saved_their_parts(make):
    one, r = make(num_shards=2, num_workers=2), prompt("r", 3)
    save = one.compute(r, [1, 2, 3])
    one.put(r.block_hashes, shards=(0, 1))
    one.report(save, [1, 1, 1])
    assert one.events() == [] and one.side.has_waiting
    one.report(save, [1, 0, 1])
    assert one.events() == [stored(r, 0, 1), stored(r, 2, 3)]
    one.tier.remove_each(object_names(b"", 0, r.block_hashes[:1], [1]))
    assert one.events() == [RemovedBlocks(0, r.block_hashes[:1])], "a part of it is gone"
    one.tier.remove_each(object_names(b"", 0, r.block_hashes[:1], [0]))
    assert one.events() == []


def test_reports_of_one_step_are_merged():
    a, b = Report({}, {}, {7: Stored(1, [1, 0])}), Report({}, {}, {7: Stored(1, [1, 1])})
    assert a.merged(b).stored == {7: Stored(2, [2, 1])}
    assert a.merged(Report()).stored == Report().merged(a).stored == {7: Stored(1, [1, 0])}


def test_loaded_blocks_are_told_each_time(make):
    one = make()
    one.put(prompt("", 4).block_hashes)
    for name in ("a", "b"):
        r = prompt(name, 4)
        assert one.add(r, [1, 2, 3, 4]) == 4 * BLOCK
        assert one.events() == []
        one.side.output(None, [name], [])
        assert one.events() == [stored(r, 0, 4)]
    failing = prompt("c", 4)
    one.add(failing, [5, 6, 7, 8])
    one.side.output(Report({}, {"c": BLOCK}), ["c"], ["c"])
    assert one.events() == []


def test_evicted_blocks_are_withdrawn(make):
    one, r = make("shm:{}/kv?size=16KiB"), prompt("r", 3)
    save = one.compute(r, [1, 2, 3])
    one.put(r.block_hashes)
    one.report(save, [1, 1, 1])
    assert one.events() == [stored(r, 0, 3)]
    one.put(hashes(10, seed=1))
    [removed] = one.events()
    there = one.tier.exists_each(object_names(b"", 0, r.block_hashes, [0])).tolist()
    gone = [name for name, is_there in zip(r.block_hashes, there, strict=True) if not is_there]
    assert gone and removed.group == 0 and sorted(removed.hashes) == sorted(gone)
    one.put(r.block_hashes)
    assert one.events() == [], "those of others are not known"


def test_block_that_is_gone_before_it_is_told_is_not_told(make):
    one, r = make(), prompt("r", 2)
    save = one.compute(r, [1, 2])
    one.put(r.block_hashes)
    one.tier.remove_each(object_names(b"", 0, r.block_hashes[1:], [0]))
    one.report(save, [1, 1])
    one.tier.remove_each(object_names(b"", 0, r.block_hashes[:1], [0]))
    assert one.events() == [stored(r, 0, 1), RemovedBlocks(0, r.block_hashes[:1])]


def test_blocks_on_the_disk_are_still_there(make):
    one, r = make("tiered:{}/ssd?memory=64KiB&disk=16MiB"), prompt("r", 3)
    save = one.compute(r, [1, 2, 3])
    one.put(r.block_hashes)
    one.report(save, [1, 1, 1])
    assert one.events() == [stored(r, 0, 3)]
    for seed in range(1, 20):
        one.put(hashes(10, seed=seed))
    keys = block_events.object_names(b"", 0, r.block_hashes, [0])
    assert one.tier.exists_each(keys).all() and one.events() == []
    one.tier.remove_each(keys)
    assert [sorted(event.hashes) for event in one.events()] == [sorted(r.block_hashes)]


def test_groups_have_events_of_their_own(make):
    one, r = make("shm:{}/kv?size=1MiB", (FULL, WINDOW)), prompt("r", 4)
    save = one.compute(r, [1, 2, 3, 4], [0, 0, 5, 6])
    one.put(r.block_hashes), one.put(r.block_hashes[2:], group=1)
    one.report(save, [1] * 6)
    assert one.events() == [stored(r, 0, 4), stored(r, 2, 4, group=1)]


def test_reset_forgets_what_was_saved_before(make):
    one, r = make(), prompt("r", 2)
    save = one.compute(r, [1, 2])
    one.put(r.block_hashes)
    assert one.side.reset()
    assert not one.side.has_waiting or one.side._waiting
    one.report(save, [1, 1])
    assert one.events() == []
    again = prompt("again", 2)
    save = one.compute(again, [3, 4])
    one.put(again.block_hashes, epoch=one.side._epoch)
    one.report(save, [1, 1])
    assert one.events() == [stored(again, 0, 2)]


def test_reset_withdraws_what_was_told(make):
    """vLLM clears its own blocks only if none is in use."""
    one, r = make("shm:{}/kv?size=1MiB", (FULL, WINDOW)), prompt("r", 4)
    save = one.compute(r, [1, 2, 3, 4], [0, 0, 5, 6])
    one.put(r.block_hashes), one.put(r.block_hashes[2:], group=1)
    one.report(save, [1] * 6)
    assert one.events() == [stored(r, 0, 4), stored(r, 2, 4, group=1)]
    one.tier.remove_each(object_names(b"", 0, r.block_hashes[:1], [0]))
    one.side._events._look()
    late = prompt("late", 1, seed=1)
    save = one.compute(late, [7], [8])
    one.put(late.block_hashes), one.put(late.block_hashes, group=1)
    one.report(save, [1] * 2)
    one.side.reset()
    assert (
        one.events()
        == [
            RemovedBlocks(0, r.block_hashes[:1]),  # it had gone before, which was not told yet
            RemovedBlocks(0, [*r.block_hashes[1:], *late.block_hashes]),
            RemovedBlocks(1, [*r.block_hashes[2:], *late.block_hashes]),
        ]
    )
    one.side.reset()
    assert one.events() == [], "once"


def test_blocks_of_before_a_reset_are_not_those_stored_since(make):
    one, r, again = make(), prompt("r", 2), prompt("again", 2)
    save = one.compute(r, [1, 2])
    one.put(r.block_hashes)
    one.report(save, [1, 1])
    one.side.reset()
    save = one.compute(again, [3, 4])
    one.put(again.block_hashes, epoch=one.side._epoch)
    one.report(save, [1, 1])
    assert one.events() == [RemovedBlocks(0, r.block_hashes), stored(again, 0, 2)]
    one.tier.remove_each(object_names(b"", 0, r.block_hashes, [0]))
    assert one.events() == []
    one.tier.remove_each(object_names(one.side._epoch, 0, r.block_hashes[1:], [0]))
    assert one.events() == [RemovedBlocks(0, r.block_hashes[1:])]


def test_store_without_a_pool_of_its_own_withdraws_nothing(monkeypatch, make):
    monkeypatch.setattr(TierStore, "watch", lambda store: None)
    monkeypatch.setattr(block_events, "MAX_KNOWN", 2)
    one, r = make(), prompt("r", 3)
    save = one.compute(r, [1, 2, 3])
    one.report(save, [1, 1, 1])
    assert one.events() == [stored(r, 0, 3)]
    again = prompt("again", 3)
    save = one.compute(again, [1, 2, 3])
    one.report(save, [1, 1, 1])
    assert one.events() == [stored(again, 0, 1)], "the oldest were forgotten"


def test_engine_without_events_asks_workers_for_no_reports():
    one, r = Scheduler(), SimpleNamespace(**vars(request("r", 2)))
    one.add(r, [1, 2])
    save = one.step(new=[(r, 0, 9)]).save
    assert not save.is_reported and one.side.take_events() == []
