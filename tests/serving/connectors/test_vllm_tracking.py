"""Which blocks a step loads and saves: by hand, and against a model of an engine."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.connectors.vllm.tracking import Blocks, Tracker, keys_of


def hashes(count: int, seed: int = 0) -> list[bytes]:
    return [(1000 * seed + i).to_bytes(8, "little") + bytes(24) for i in range(count)]


def test_keys_are_the_first_bytes_of_hashes():
    assert keys_of([b"\x01" + bytes(31), b"\xff" * 32]) == [1, 2**64 - 1]


def test_chunked_prompt_and_generated_blocks_are_saved():
    tracker, names = Tracker(saves=True), hashes(3)
    tracker.add("r", names)
    tracker.extend("r", [7, 8, 9, 10])
    tracker.compute("r", 2)
    assert tracker.take() == ([], [Blocks([0, 1], [7, 8], 0)])
    tracker.compute("r", 2)  # no further one has become full
    assert tracker.take() == ([], [])
    tracker.compute("r", 3)
    assert tracker.take() == ([], [Blocks([2], [9], 2)])
    tracker.compute("r", 4)  # tokens of a draft, which nobody has hashed
    assert tracker.take() == ([], [])
    names += hashes(4)[3:]
    tracker.compute("r", 4)
    assert tracker.take() == ([], [Blocks([3], [10], 3)])


def test_loaded_blocks_are_not_saved_again():
    tracker = Tracker(saves=True)
    tracker.add("r", hashes(5))
    tracker.load("r", 1, [8, 9])  # block 0 is in the engine's own cache
    tracker.extend("r", [7, 8, 9, 10, 11])
    tracker.skip("r", 3)
    tracker.compute("r", 5)
    assert tracker.take() == ([Blocks([1, 2], [8, 9], 1)], [Blocks([3, 4], [10, 11], 3)])


def test_preempted_request_starts_over():
    tracker = Tracker(saves=True)
    tracker.add("r", hashes(3))
    tracker.extend("r", [1, 2, 3])
    tracker.compute("r", 3)
    tracker.take()
    tracker.add("r", hashes(4))
    tracker.load("r", 0, [5, 6, 7])
    tracker.forget_blocks("r")
    tracker.extend("r", [5, 6, 7, 8])
    tracker.skip("r", 3)
    tracker.compute("r", 4)
    assert tracker.take() == ([Blocks([0, 1, 2], [5, 6, 7], 0)], [Blocks([3], [8], 3)])


def test_tracker_without_saving_saves_nothing():
    tracker = Tracker(saves=False)
    tracker.add("r", hashes(3))
    tracker.extend("r", [1, 2, 3])
    tracker.compute("r", 3)
    assert tracker.take() == ([], [])


def test_finished_request_is_forgotten():
    tracker = Tracker(saves=True)
    tracker.add("r", hashes(1))
    assert tracker.knows("r") and len(tracker) == 1
    tracker.remove("r")
    tracker.remove("r")
    assert not tracker.knows("r") and len(tracker) == 0


def test_only_later_requests_are_saved_after_a_failed_load():
    tracker = Tracker(saves=True)
    tracker.add("r", hashes(2))
    tracker.extend("r", [1, 2])
    tracker.compute("r", 1)
    tracker.forget_all()
    assert not tracker.knows("r")
    tracker.add("s", hashes(1))
    tracker.extend("s", [3])
    tracker.compute("s", 1)
    assert tracker.take() == ([], [Blocks([0], [3], 0)])
    tracker.remove("r")


@given(st.data())
def test_each_block_is_saved_once_from_its_own_place(data):
    """Requests of several lengths, whose steps and blocks come as they come."""
    tracker = Tracker(saves=True)
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4), "lengths")
    known = [data.draw(st.integers(0, length)) for length in lengths]
    done, given_ids = list(known), [0] * len(lengths)
    saved: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(lengths))}
    for i, length in enumerate(lengths):
        tracker.add(str(i), hashes(length, i))
        tracker.skip(str(i), known[i])
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        i = data.draw(st.sampled_from([i for i, d in enumerate(done) if d < lengths[i]]))
        done[i] = data.draw(st.integers(done[i] + 1, lengths[i]))
        ids = [100 * i + block for block in range(given_ids[i], done[i])]
        given_ids[i] = max(given_ids[i], done[i])
        tracker.extend(str(i), ids)
        tracker.compute(str(i), done[i])
        for blocks in tracker.take()[1]:
            assert blocks.position == known[i] + len(saved[i])
            saved[i] += zip(blocks.keys, blocks.ids, strict=True)
    for i, length in enumerate(lengths):
        assert saved[i] == [(1000 * i + b, 100 * i + b) for b in range(known[i], length)]
