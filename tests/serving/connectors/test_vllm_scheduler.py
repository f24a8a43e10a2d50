"""The scheduler's side without vLLM: by hand, and against a model of an engine."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.connectors.vllm.scheduler import StoreScheduler
from mooncake_serving.connectors.vllm.steps import Blocks, GroupForm, Load, Report, object_names

BLOCK = 4
FULL = GroupForm("full", BLOCK)
WINDOW = GroupForm("window", BLOCK, 6)


class FakeStore:
    """A set of names."""

    def __init__(self, is_local=True):
        self.names, self.is_local = set(), is_local

    def exists_each(self, names):
        return np.array([name in self.names for name in names], bool)

    def match_prefix(self, names):
        found = [name in self.names for name in names]
        return found.index(False) if False in found else len(found)


class FakePool:
    """vLLM's ``BlockPool``: counts references."""

    def __init__(self, num_blocks=1000):
        self.blocks = [SimpleNamespace(block_id=i, references=0) for i in range(num_blocks)]

    def touch(self, blocks):
        for block in blocks:
            block.references += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.references -= 1
            assert block.references >= 0

    def held(self):
        return {block.block_id for block in self.blocks if block.references}


def hashes(count, seed=0):
    return [(1000 * seed + i).to_bytes(8, "little") + bytes(24) for i in range(count)]


class Scheduler:
    """A ``StoreScheduler`` with what vLLM would give it."""

    def __init__(self, groups=(FULL,), store=None, pool=None, **options):
        self.store, self.pool = store or FakeStore(), pool or FakePool()
        self.side = StoreScheduler(
            self.store, "n", groups, tokens_per_hash=BLOCK,
            num_blocks=len(self.pool.blocks), **options,
        )  # fmt: skip
        self.side.bind_block_pool(self.pool)
        self.tables = {}

    def save(self, names, group=0, shards=(0,), epoch=b""):
        self.store.names |= set(object_names(epoch, group, names, shards))

    def add(self, request, *tables, computed=0):
        """Look up and allocate; returns the tokens that are found."""
        found, _ = self.side.matched(request, computed)
        self.tables[request.request_id] = tables
        self.side.allocated(request, tables, found)
        return found

    def step(self, new=(), running=(), states=None):
        """Each is (request, tokens computed before, tokens of this step)."""
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=done) for r, done, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _, _ in running],
                num_computed_tokens=[done for _, done, _ in running],
                resumed_req_ids=set(),
            ),
            num_scheduled_tokens={r.request_id: n for r, _, n in (*new, *running)},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=self.tables.get, boundary_state_offloads=states or {}
            ),
        )
        return self.side.step(output)


def request(name, num_hashes, num_tokens=None, seed=0):
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes(num_hashes, seed),
        num_tokens=num_hashes * BLOCK + 1 if num_tokens is None else num_tokens,
        num_computed_tokens=0,
    )


def test_longest_prefix_in_the_store_is_loaded_asynchronously():
    one = Scheduler()
    one.save(hashes(3))
    r = request("r", 5)
    assert one.side.matched(r, 0) == (3 * BLOCK, True)
    assert one.side.matched(r, BLOCK) == (2 * BLOCK, True)
    assert one.side.matched(r, 3 * BLOCK) == (0, False)
    assert one.side.matched(r, BLOCK + 1) == (0, False)  # within a block
    assert one.add(r, [7, 8, 9, 10, 11], computed=BLOCK) == 2 * BLOCK
    assert one.step().loads == [Load("r", [Blocks(0, [1, 2], [8, 9], hashes(3)[1:])])]
    assert one.step().loads == []


def test_last_token_is_always_computed():
    one = Scheduler()
    one.save(hashes(2))
    assert one.side.matched(request("r", 2, 2 * BLOCK), 0) == (BLOCK, True)
    assert one.side.matched(request("r", 2, 2 * BLOCK + 1), 0) == (2 * BLOCK, True)


def test_prefix_counts_only_with_the_parts_of_all_workers():
    one = Scheduler(num_shards=2, num_workers=2)
    one.save(hashes(3), shards=(0,))
    assert one.side.matched(request("r", 3), 0) == (0, False)
    one.save(hashes(2), shards=(1,))
    assert one.side.matched(request("r", 3), 0) == (2 * BLOCK, True)


def test_window_needs_only_its_tail():
    one = Scheduler((FULL, WINDOW))
    one.save(hashes(6))
    assert one.side.matched(request("r", 6), 0) == (0, False)
    one.save(hashes(5)[3:], group=1)  # 5 of the tokens before the next one: two blocks
    r = request("r", 6)
    assert one.add(r, [1, 2, 3, 4, 5, 6], [0, 0, 0, 9, 10, 11]) == 5 * BLOCK
    [load] = one.step().loads
    assert [(b.group, b.places, b.ids) for b in load.blocks] == [
        (0, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        (1, [3, 4], [9, 10]),
    ]


def test_window_of_the_engine_itself_completes_a_hit():
    one = Scheduler((FULL, WINDOW))
    one.save(hashes(3)), one.save(hashes(3)[2:], group=1)
    r = request("r", 6)
    assert one.add(r, [1, 2, 3], [0, 5, 6], computed=2 * BLOCK) == BLOCK
    [load] = one.step().loads
    assert [(b.places, b.ids) for b in load.blocks] == [([2], [3]), ([2], [6])]


def test_groups_of_other_block_sizes_use_the_hash_at_their_end():
    one = Scheduler((GroupForm("full", 2 * BLOCK), FULL))
    one.save(hashes(4)[1::2], group=0), one.save(hashes(3), group=1)
    assert one.side.matched(request("r", 4), 0) == (2 * BLOCK, True)


def test_filled_blocks_are_saved_once():
    one, r = Scheduler(), request("r", 3)
    one.add(r, [7, 8, 9, 10])
    step = one.step(new=[(r, 0, 2 * BLOCK + 1)])
    assert step.save.blocks == [Blocks(0, [0, 1], [7, 8], hashes(2))]
    assert one.step(running=[(r, 2 * BLOCK + 1, 1)]).save is None
    assert one.step(running=[(r, 2 * BLOCK + 2, 2)]).save.blocks[0].ids == [9]
    assert one.step(running=[(r, 3 * BLOCK, BLOCK)]).save is None  # a draft, which has no hash
    r.block_hashes += hashes(4)[3:]
    assert one.step(running=[(r, 4 * BLOCK, 1)]).save.blocks[0].ids == [10]


def test_blocks_that_were_found_are_not_saved():
    one, r = Scheduler(), request("r", 5)
    one.save(hashes(3))
    one.add(r, [7, 8, 9, 10, 11], computed=BLOCK)
    one.step()
    one.side.output(None, ["r"], [])
    step = one.step(new=[(r, 3 * BLOCK, 2 * BLOCK)])
    assert [blocks.ids for blocks in step.save.blocks] == [[10, 11]]


def test_blocks_that_the_engine_had_are_offered_again_once():
    """The store may have lost them: what follows is of no use without."""
    one, r = Scheduler(), request("r", 4)
    one.side.allocated(r, ([12, 13],), 0)
    one.tables["r"] = ([12, 13, 14],)
    assert one.step(new=[(r, BLOCK, BLOCK)]).save.blocks[0].ids == [12, 13]
    assert one.step(running=[(r, 2 * BLOCK, BLOCK)]).save.blocks[0].ids == [14]


def test_block_is_kept_until_all_workers_have_copied_it():
    one, r = Scheduler(num_workers=2), request("r", 2)
    one.add(r, [7, 8])
    save = one.step(new=[(r, 0, 2 * BLOCK)]).save
    one.side.finished(r, one.tables["r"])
    assert one.pool.held() == {7, 8} and one.side.has_waiting
    one.side.output(Report({save.number: 1}), [], [])
    assert one.pool.held() == {7, 8}
    one.side.output(Report({save.number: 1}), [], [])
    assert one.pool.held() == set() and not one.side.has_waiting


@pytest.mark.parametrize("is_received", [False, True])
def test_blocks_that_another_engine_sends_are_saved_only_once_they_are_there(is_received):
    """vLLM counts the whole prompt as computed from the begin, and keeps that if it fails."""
    one, r = Scheduler(), request("r", 3)
    one.side.allocated(r, ([7, 8, 9],), 0, is_awaited=True)
    one.tables["r"] = ([7, 8, 9],)
    r.num_computed_tokens = 3 * BLOCK + 1
    one.step()
    if is_received:
        one.side.output(None, ["r"], [])
        save = one.step(new=[(r, 3 * BLOCK, 1)]).save
        assert save.blocks[0].ids == [7, 8, 9]
        return
    one.side.finished(r, one.tables["r"])
    assert one.step().save is None and not one.pool.held()
    one.side.output(None, ["r"], ["r"])  # what vLLM still waits for
    assert one.step().save is None and not one.pool.held()


def test_handed_off_request_that_failed_may_be_loaded_from_the_store():
    one, r = Scheduler(), request("r", 3)
    one.side.allocated(r, ([7, 8, 9],), 0, is_awaited=True)
    one.side.output(None, ["r"], ["r"])
    one.save(hashes(3))
    assert one.add(r, [7, 8, 9, 10]) == 3 * BLOCK and one.side.is_loading("r")
    one.side.output(None, ["r"], [])
    assert not one.side.is_loading("r")


def test_finished_request_saves_what_was_hashed_late():
    one, r = Scheduler(), request("r", 1)
    one.add(r, [7, 8])
    one.step(new=[(r, 0, 2 * BLOCK)])
    r.block_hashes += hashes(2)[1:]
    r.num_computed_tokens = 2 * BLOCK
    one.side.finished(r, ([7, 8],))
    assert one.pool.held() == {7, 8}
    assert one.step().save.blocks[0].ids == [8]


def test_request_aborted_while_it_loads_saves_nothing():
    one, r = Scheduler(), request("r", 3)
    one.save(hashes(2))
    one.add(r, [7, 8, 9])
    one.step()
    r.num_computed_tokens = 3 * BLOCK
    one.side.finished(r, ([7, 8, 9],))
    assert not one.pool.held() and one.step().save is None
    one.side.output(Report({}, {"r": 0}), ["r"], ["r"])
    assert one.side.matched(request("r", 3), 0) == (2 * BLOCK, True), "another of that name"


def test_failed_load_is_tried_again_up_to_the_block_that_did_not_come():
    one, r = Scheduler(), request("r", 4)
    one.save(hashes(4))
    assert one.add(r, [7, 8, 9, 10]) == 4 * BLOCK
    one.step()
    one.side.output(Report({}, {"r": 2 * BLOCK}), [], [])  # another worker is not ready
    one.side.output(None, ["r"], ["r"])
    assert one.add(r, [1, 2, 3, 4]) == 2 * BLOCK
    one.step()
    one.side.output(Report({}, {"r": 0}), ["r"], ["r"])
    assert one.add(r, [1, 2, 3, 4]) == 0
    step = one.step(new=[(r, 0, 4 * BLOCK)])
    assert step.save.blocks[0].ids == [1, 2, 3, 4], "what it computes itself is right"


def test_running_requests_leave_blocks_to_others_while_saves_wait():
    one, r = Scheduler(pool=FakePool(16)), request("r", 8)
    one.add(r, [1, 2, 3, 4, 5, 6, 7, 8])
    save = one.step(new=[(r, 0, 8 * BLOCK)]).save
    assert save.blocks[0].ids == [1, 2, 3, 4]  # a quarter of 16
    assert one.step(running=[(r, 8 * BLOCK, 1)]).save is None
    one.side.output(Report({save.number: 1}), [], [])
    assert one.step(running=[(r, 8 * BLOCK + 1, 1)]).save.blocks[0].ids == [5, 6, 7, 8]


def test_what_is_too_much_at_the_end_is_counted():
    one, r = Scheduler(pool=FakePool(16)), request("r", 12)
    one.add(r, list(range(1, 13)))
    one.step(new=[(r, 0, 12 * BLOCK)])
    r.num_computed_tokens = 12 * BLOCK
    assert one.side.counts() == {}
    one.side.finished(r, one.tables["r"])
    assert one.side.counts() == {"unsaved_blocks": 4}  # half of 16 were saved
    assert one.side.counts() == {}


def test_states_are_saved_when_vllm_offers_them_and_the_last_is_loaded():
    one, r = Scheduler((FULL, GroupForm("state", 2 * BLOCK))), request("r", 5)
    one.add(r, [1, 2, 3, 4, 5], [0, 8, 9])
    offered = {
        "r": [(1, 8, 2 * BLOCK), (1, 9, 5), (1, 0, 4 * BLOCK), (1, 9, 6 * BLOCK)],
        "s": [(1, 7, 8)],
    }
    step = one.step(new=[(r, 0, 3 * BLOCK)], states=offered)
    assert step.save.blocks == [
        Blocks(0, [0, 1, 2], [1, 2, 3], hashes(3)),
        Blocks(1, [0], [8], hashes(2)[1:]),
    ]
    assert one.pool.held() == {1, 2, 3, 8}
    one.save(hashes(5)), one.save([hashes(2)[1], hashes(4)[3]], group=1)
    s = request("s", 5)
    assert one.add(s, [11, 12, 13, 14, 15], [0, 18, 19]) == 4 * BLOCK
    [load] = one.step().loads
    assert [(b.places, b.ids) for b in load.blocks] == [
        ([0, 1, 2, 3], [11, 12, 13, 14]),
        ([1], [18]),
    ]


def test_blocks_outside_the_window_are_passed_over():
    one, r = Scheduler((WINDOW,)), request("r", 4)
    one.add(r, [0, 0, 5, 6])
    assert one.step(new=[(r, 0, 4 * BLOCK)]).save.blocks == [
        Blocks(0, [2, 3], [5, 6], hashes(4)[2:])
    ]


@pytest.mark.parametrize("loads, saves", [(True, False), (False, True)])
def test_roles(loads, saves):
    one, r = Scheduler(loads=loads, saves=saves), request("r", 2)
    one.save(hashes(1))
    assert one.side.matched(r, 0) == ((BLOCK, True) if loads else (0, False))
    one.side.allocated(r, ([1, 2],), 0)
    one.tables["r"] = ([1, 2],)
    assert (one.step(new=[(r, 0, 2 * BLOCK)]).save is not None) == saves
    one.side.finished(r, ([1, 2],))


def test_lookup_on_other_hosts_holds_up_no_one():
    one = Scheduler(store=FakeStore(is_local=False))
    one.save(hashes(2))
    r = request("r", 2)
    assert one.side.matched(r, 0) == (None, False)
    one.side._lookups["r"][1].result(10)
    assert one.side.matched(r, 0) == (2 * BLOCK, True)
    one.side.close()


def test_reset_forgets_what_the_store_has():
    one, r = Scheduler(), request("r", 2)
    one.save(hashes(2))
    assert one.side.matched(r, 0)[0] == 2 * BLOCK
    assert one.side.reset() is True
    assert one.side.matched(r, 0) == (0, False)
    epoch = one.step().epoch
    one.save(hashes(2), epoch=epoch)
    assert one.side.matched(r, 0)[0] == 2 * BLOCK
    one.side.allocated(r, ([1, 2],), 2 * BLOCK)
    assert one.side.reset() is False, "a load of former blocks is under way"


def test_running_request_saves_nothing_after_a_reset():
    one, r = Scheduler(), request("r", 2)
    one.add(r, [1, 2])
    one.side.reset()
    assert one.step(new=[(r, 0, 2 * BLOCK)]).save is None
    one.side.finished(r, ([1, 2],))
    assert not one.pool.held()


def test_reports_of_workers_are_merged():
    merged = Report({1: 1, 2: 1}, {"a": 8}).merged(Report({1: 1}, {"a": 4, "b": 0}))
    assert merged == Report({1: 2, 2: 1}, {"a": 4, "b": 0})


@settings(deadline=None)
@given(st.data())
def test_each_block_is_saved_once_from_its_own_place(data):
    """Requests of several lengths, whose steps and blocks come as they come."""
    one = Scheduler()
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4), "lengths")
    known = [data.draw(st.integers(0, length)) for length in lengths]
    requests = [request(str(i), length, seed=i) for i, length in enumerate(lengths)]
    saved = Counter()
    for r in requests:
        one.side.allocated(r, ([],), 0)
        one.tables[r.request_id] = ([],)
    done = [None] * len(lengths)
    while any(d is None or d < n for d, n in zip(done, lengths, strict=True)):
        i = data.draw(
            st.sampled_from([i for i, d in enumerate(done) if d is None or d < lengths[i]])
        )
        r, first = requests[i], known[i] if done[i] is None else done[i]
        end = data.draw(st.integers(min(first + 1, lengths[i]), lengths[i]))
        one.tables[r.request_id] = ([100 * i + 1 + block for block in range(end)],)
        entry = [(r, first * BLOCK, (end - first) * BLOCK)]
        step = one.step(**{"new" if done[i] is None else "running": entry})
        done[i] = end
        for blocks in step.save.blocks if step.save else ():
            assert blocks.ids == [100 * i + 1 + place for place in blocks.places]
            saved.update(zip([i] * len(blocks.ids), blocks.places, strict=True))
        if step.save:
            one.side.output(Report({step.save.number: 1}), [], [])
    want = {(i, b): 1 for i, n in enumerate(lengths) for b in range(n)}
    assert saved == Counter(want) and not one.pool.held()
