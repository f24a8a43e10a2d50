"""Cache events in any order, against what the instances hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import InvalidArgument, KVEvent, PrefixIndex, ShardedIndex

from .support import chain, longest, make

NUM_INSTANCES = 3
INDEXES = pytest.mark.parametrize(
    "new", [PrefixIndex, lambda n, **o: ShardedIndex(n, 3, depth=2, **o)], ids=["one", "3 shards"]
)

changes = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.builds(chain, st.integers(0, 255), st.integers(1, 9))),
        st.tuples(st.just("removed"), st.lists(st.integers(1, 511), max_size=8)),
        st.tuples(st.sampled_from(["emptied", "restarts"]), st.just([])),
    ),
    max_size=12,
)
histories = st.lists(changes, min_size=NUM_INSTANCES, max_size=NUM_INSTANCES)


class Instance:
    """A cache that tells what changes in it."""

    def __init__(self, number: int):
        self.number, self.epoch, self.sequence = number, 0, 0
        self.chains: list[list[int]] = []
        self.held: set[int] = set()

    def tell(self, **what) -> KVEvent:
        self.sequence += 1
        return KVEvent(self.number, self.sequence - 1, epoch=self.epoch, **what)

    def snapshot(self) -> KVEvent:
        whole = [tuple(keys[: longest(self.held, keys)]) for keys in self.chains]
        self.held = set().union(*whole)  # what lies after a hole is of no use
        return self.tell(stored=tuple(whole), snapshot=True)

    def does(self, changes) -> list[KVEvent]:
        events = []
        for name, keys in changes:
            if name == "stored":
                self.chains.append(keys)
                self.held |= set(keys)
                events.append(self.tell(stored=(tuple(keys),)))
            elif name == "removed":
                self.held -= set(keys)
                events.append(self.tell(removed=tuple(keys)))
            else:
                self.held.clear()
                if name == "emptied":
                    events.append(self.tell(snapshot=True))
                else:
                    self.epoch, self.sequence = self.epoch + 1, 0
                    events.append(self.tell())  # else no one hears that it is there again
        return events


def assert_equal(index, instances) -> None:
    for keys in (chain(tail, 9) for tail in (0, 37, 255)):
        assert index.match(keys).tolist() == [longest(one.held, keys) for one in instances]
    for key in range(1, 512):
        assert index.holders(key) == [one.number for one in instances if key in one.held]


@INDEXES
@given(histories=histories, data=st.data())
@settings(max_examples=80, deadline=None)
def test_events_apply_in_any_order_and_twice(new, histories, data):
    """Once all are there, the index is as if they had come in turn."""
    instances = [Instance(i) for i in range(NUM_INSTANCES)]
    events = [
        event for one, steps in zip(instances, histories, strict=True) for event in one.does(steps)
    ]
    again = data.draw(st.lists(st.sampled_from(events), max_size=5)) if events else []
    index = new(NUM_INSTANCES)
    for event in data.draw(st.permutations(events + again)):
        index.apply(event)
    assert_equal(index, instances)
    assert all(index.apply(event) for event in events)
    assert_equal(index, instances)


@INDEXES
@given(histories=histories, then=histories, max_waiting=st.integers(0, 5), data=st.data())
@settings(max_examples=80, deadline=None)
def test_snapshot_repairs_any_loss(new, histories, then, max_waiting, data):
    """Restarts, a late observer, lost and doubled events, failures that the owner has told of."""
    instances = [Instance(i) for i in range(NUM_INSTANCES)]
    told = [
        event for one, steps in zip(instances, histories, strict=True) for event in one.does(steps)
    ]
    index = new(NUM_INSTANCES, max_waiting_events=max_waiting)
    for event in data.draw(st.lists(st.sampled_from(told), max_size=30)) if told else []:
        index.apply(event)
        if data.draw(st.integers(0, 9)) == 0:
            index.clear(event.instance)
    for one in instances:
        assert index.apply(one.snapshot())
        late = data.draw(st.lists(st.sampled_from(told), max_size=5)) if told else []
        assert all(index.apply(event) for event in late if event.instance == one.number)
    assert_equal(index, instances)
    for one, steps in zip(instances, then, strict=True):
        assert all(index.apply(event) for event in one.does(steps))
    assert_equal(index, instances)


@INDEXES
def test_a_late_event_is_waited_for(new):
    index = new(1)
    assert index.apply(KVEvent(0, 0, stored=((4,),)))
    assert index.apply(KVEvent(0, 2, removed=(7,)))
    assert index.apply(KVEvent(0, 3, stored=((5, 6),)))
    assert index.match([5, 6]).tolist() == [0], "event 1 may yet come"
    assert index.apply(KVEvent(0, 1, stored=((7,),)))
    assert index.match([5, 6]).tolist() == [2] and index.holders(7) == []


@INDEXES
def test_lost_event_requires_a_snapshot(new):
    index = new(2, max_waiting_events=3)
    index.add(1, [1])
    after = [KVEvent(0, number, stored=((number,),)) for number in (0, 2, 3, 4, 5, 6)]
    assert [index.apply(event) for event in after] == [True, True, True, True, False, False]
    assert index.apply(KVEvent(1, 0, stored=((8,),))), "the others go on"
    assert not index.apply(KVEvent(0, 4, snapshot=True)), "5 has come and was given up"
    assert index.apply(KVEvent(0, 7, stored=((1, 2), (1, 3)), snapshot=True))
    assert index.match([1, 3]).tolist() == [2, 1]
    assert index.holders(4) == []
    assert index.apply(KVEvent(0, 8, removed=(3,)))
    assert index.match([1, 3]).tolist() == [1, 1]
    assert index.apply(KVEvent(0, 1, stored=((9,),))) and index.holders(9) == [], "too late"


@INDEXES
def test_lost_events_may_be_sent_again(new):
    index = new(1, max_waiting_events=1)
    events = [KVEvent(0, number, stored=((number,),)) for number in range(5)]
    assert [index.apply(events[number]) for number in (0, 2, 3)] == [True, True, False]
    assert [index.apply(events[number]) for number in (1, 2, 3, 4)] == [False, False, True, True]
    assert [index.holders(key) for key in range(5)] == [[0]] * 5


@INDEXES
def test_events_dropped_twice_all_count_as_missed(new):
    """Sent again are 2 to 4, which are too many once more, and then 1 to 4, but not 5 to 7."""
    index = new(1, max_waiting_events=2)
    came = (0, 5, 6, 7, 2, 3, 4, 1, 2, 3, 4, 8, 5, 6, 7)
    told = [index.apply(KVEvent(0, number, stored=((number,),))) for number in came]
    assert told == [True] * 3 + [False] * 11 + [True]
    assert [index.holders(key) for key in range(9)] == [[0]] * 9


@INDEXES
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3)), max_size=9), st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_index_is_current_once_all_gaps_are_filled(new, runs, max_waiting):
    """Runs of events are late, lost, doubled, and sent again in any order."""
    index = new(1, max_waiting_events=max_waiting)
    came = [number for first, count in runs for number in range(first, first + count)]
    told = [index.apply(KVEvent(0, number, stored=((number,),))) for number in came]
    if all(told[-1:]):
        for number in sorted(set(range(10)) - set(came)):
            assert index.apply(KVEvent(0, number, stored=((number,),)))
        assert [index.holders(key) for key in range(10)] == [[0]] * 10


@INDEXES
def test_attaching_to_a_running_instance_requests_a_snapshot(new):
    index = new(2)
    assert not index.apply(KVEvent(0, 500, stored=((5,),)))
    assert not index.apply(KVEvent(0, 503, stored=((1, 2),)))
    assert index.apply(KVEvent(0, 502, stored=((1,),), snapshot=True))
    assert index.match([1, 2]).tolist() == [2, 0] and index.holders(5) == []
    assert not index.apply(KVEvent(1, 1, stored=((1, 2),)))
    assert index.apply(KVEvent(1, 0, stored=((7,),))), "or for what was before"
    assert index.match([1, 2]).tolist() == [2, 2]


@INDEXES
def test_new_epoch_empties_an_instance(new):
    index = new(1)
    for number in range(3):
        assert index.apply(KVEvent(0, number, stored=((number,),), epoch=7))
    assert not index.apply(KVEvent(0, 1, stored=((8,),), epoch=9)), "0 has not come"
    assert [index.holders(key) for key in (0, 1, 2, 8)] == [[], [], [], []]
    assert index.apply(KVEvent(0, 0, stored=((1,),), epoch=9))
    assert index.apply(KVEvent(0, 3, stored=((5,),), epoch=7)), "of its earlier life"
    assert index.apply(KVEvent(0, 9, stored=((5,),), snapshot=True, epoch=8))
    assert [index.holders(key) for key in (1, 8, 5)] == [[0], [0], []]


@INDEXES
def test_a_restart_without_epochs_is_recognised_by_clear(new):
    index = new(1)
    for number in range(2):
        assert index.apply(KVEvent(0, number, stored=((1, 2),)))
    assert index.apply(KVEvent(0, 3, stored=((3,),))), "2 may yet come"
    index.clear(0)
    assert index.apply(KVEvent(0, 0, stored=((1,),), snapshot=True))
    assert index.match([1, 2]).tolist() == [1]
    assert index.apply(KVEvent(0, 1, stored=((1, 2),))) and index.match([1, 2]).tolist() == [2]
    assert index.apply(KVEvent(0, 2)) and index.holders(3) == [], "of its earlier life"


def test_failure_resets_the_event_sequence():
    conductor = make(1, 1)
    index = conductor.index
    for number in range(2):
        assert index.apply(KVEvent(0, number, stored=((1, 2),)))
    conductor.failed(0)
    assert index.match([1, 2]).tolist() == [0, 0]
    assert index.apply(KVEvent(0, 0, stored=((1,),)))
    conductor.recovered(0)
    assert index.match([1, 2]).tolist() == [1, 0], "it may have told before anybody saw it"
    conductor.failed(0)
    conductor.recovered(0)
    assert not index.apply(KVEvent(0, 1, stored=((1, 2),))), "it was only out of reach"
    assert index.apply(KVEvent(0, 2, stored=((1, 2),), snapshot=True))
    assert index.match([1, 2]).tolist() == [2, 0]


@INDEXES
def test_an_event_of_an_unknown_instance_is_named(new):
    with pytest.raises(InvalidArgument, match=r"apply: instance must be in \[0, 2\), got 3"):
        new(2).apply(KVEvent(3, 5))
