"""A worker's side without vLLM: blocks of its caches through a store, into another worker's."""

import threading
import time

import numpy as np
import pytest
import torch

from mooncake_serving.connectors.tier_store import TierStore
from mooncake_serving.connectors.vllm import worker as module
from mooncake_serving.connectors.vllm.steps import (
    Blocks,
    GroupForm,
    Load,
    Report,
    Save,
    Shards,
    Step,
    Stored,
    object_names,
)  # fmt: skip
from mooncake_serving.connectors.vllm.worker import StoreWorker

NUM_BLOCKS, BLOCK = 40, 16


def hashes(*numbers):
    return [number.to_bytes(32, "little") for number in numbers]


@pytest.fixture
def url(tmp_path):
    return f"shm:{tmp_path}/kv?size=16MiB"


def caches(value=None, num_layers=2):
    layers = {f"layer{i}": torch.zeros(NUM_BLOCKS, 2, BLOCK, 8) for i in range(num_layers)}
    for layer in layers.values():
        layer.normal_() if value is None else layer.fill_(value)
    return layers


class Worker:
    def __init__(self, url, layers, groups=None, shards=None):
        groups = groups or [list(layers)]
        forms = [GroupForm("full", BLOCK)] * len(groups)
        self.layers, self.stores = layers, []
        self.side = StoreWorker(
            lambda namespace: TierStore(url, namespace), TierStore.close, forms, groups,
            num_blocks=NUM_BLOCKS, shards=shards or Shards(),
        )  # fmt: skip
        self.side.register_kv_caches(layers)

    def save(self, *blocks, number=0, epoch=b""):
        self.side.save(Step("n", epoch, [], Save(number, list(blocks))))
        return self.reports(number)

    def load(self, *blocks, epoch=b""):
        """Returns whether the load failed, and the tokens that came before that."""
        self.side.start(Step("n", epoch, [Load("r", list(blocks))], None))
        received, failed = wait_for(lambda: (got := self.side.get_finished())[0] and got)
        assert received == {"r"}
        report = self.side.report()
        return bool(failed), report.usable["r"] if report and "r" in report.usable else None

    def reports(self, number):
        return wait_for(self.side.report).copied == {number: 1}


def wait_for(call):
    end = time.monotonic() + 30
    while not (got := call()):
        assert time.monotonic() < end
        time.sleep(0.001)
    return got


@pytest.fixture
def make():
    made = []

    def make_worker(*arguments, **options):
        made.append(Worker(*arguments, **options))
        return made[-1]

    yield make_worker
    for worker in made:
        worker.side.close()
        worker.side.close()


@pytest.mark.parametrize("num_rows", [1, 3, 1000])
def test_blocks_round_trip_into_another_engine(make, url, monkeypatch, num_rows):
    monkeypatch.setattr(module, "STAGING_BYTES", num_rows * 2 * 2 * BLOCK * 8 * 4)
    here, there = make(url, caches()), make(url, caches())
    before = {name: layer.clone() for name, layer in there.layers.items()}
    ids, others = [3, 39, 1, 7, 21], [5, 4, 9, 2, 38]
    places, names = [0, 1, 2, 3, 4], hashes(1, 2, 3, 4, 5)
    assert here.save(Blocks(0, places, ids, names))
    here.side.close()
    assert there.load(Blocks(0, places, others, names)) == (False, None)
    for name, layer in there.layers.items():
        before[name][others] = here.layers[name][ids]
        assert torch.equal(layer, before[name])


def test_saves_report_which_blocks_the_store_has(make, url, monkeypatch):
    monkeypatch.setattr(module, "STAGING_BYTES", 2 * 2 * 2 * BLOCK * 8 * 4)  # pieces of two blocks
    here, copy = make(url, caches()), make(url, caches(), shards=Shards(writes=False))
    put = TierStore.put_each

    def put_but_the_second(store, names, addresses, sizes):
        stored = put(store, names, addresses, sizes)
        return stored & np.array([name[-32:] != hashes(2)[0] for name in names])

    monkeypatch.setattr(TierStore, "put_each", put_but_the_second)
    first = Blocks(0, [0, 1, 2], [5, 6, 7], hashes(1, 2, 3))
    again = Blocks(0, [0, 2, 3], [5, 7, 8], hashes(1, 3, 4))

    def stored(side, number, *blocks):
        side.save(Step("n", b"", [], Save(number, list(blocks), is_reported=True)))
        found = {}
        wait_for(lambda: found.update(((report := side.report()) and report.stored) or {}) or found)
        return found

    assert stored(here.side, 0, first) == {0: Stored(1, [1, 0, 1])}
    assert stored(here.side, 1, again) == {1: Stored(1, [1, 1, 1])}, "some it has found there"
    monkeypatch.setattr(here.side, "_store", None)
    monkeypatch.setattr(here.side, "_retry_at", float("inf"))
    assert stored(here.side, 2, first) == {2: Stored(1, [0, 0, 0])}
    copy.side.save(Step("n", b"", [], Save(3, [first], is_reported=True)))
    assert copy.side.report() == Report(copied={3: 1}), "another worker saves what this one has"


def test_groups_have_objects_of_their_own(make, url):
    here = make(url, caches(), groups=[["layer0"], ["layer1"]])
    there = make(url, caches(0.0), groups=[["layer0"], ["layer1"]])
    assert here.save(Blocks(0, [0], [1], hashes(1)), Blocks(1, [0], [2], hashes(1)))
    here.side.close()
    assert there.load(Blocks(0, [0], [4], hashes(1)), Blocks(1, [0], [5], hashes(1)))[0] is False
    assert torch.equal(there.layers["layer0"][4], here.layers["layer0"][1])
    assert torch.equal(there.layers["layer1"][5], here.layers["layer1"][2])
    assert not there.layers["layer0"][5].any() and not there.layers["layer1"][4].any()


def test_workers_have_objects_of_their_own(make, url):
    first, second = (make(url, caches(i + 1.0), shards=Shards(2, i)) for i in range(2))
    for one in (first, second):
        assert one.save(Blocks(0, [0], [1], hashes(1)))
        one.side.close()
    for i in range(2):
        there = make(url, caches(0.0), shards=Shards(2, i))
        assert there.load(Blocks(0, [0], [1], hashes(1)))[0] is False
        assert (there.layers["layer0"][1] == i + 1.0).all()


def test_worker_with_the_same_bytes_as_another_only_reports(make, url):
    one = make(url, caches(), shards=Shards(1, 0, writes=False))
    assert one.save(Blocks(0, [0], [1], hashes(1)))
    assert one.load(Blocks(0, [0], [1], hashes(1))) == (True, 0)


def test_missing_block_fails_the_load_from_there_on(make, url):
    here, there = make(url, caches()), make(url, caches())
    here.save(Blocks(0, [0, 1, 3], [1, 2, 3], hashes(1, 2, 4)))
    here.side.close()
    load = Blocks(0, [0, 1, 2, 3], [5, 6, 7, 8], hashes(1, 2, 3, 4))
    assert there.load(load) == (True, 2 * BLOCK)


def test_object_of_another_size_fails_the_load(make, url):
    here, there = make(url, caches(num_layers=1)), make(url, caches(num_layers=2))
    here.save(Blocks(0, [0], [1], hashes(1)))
    here.side.close()
    assert there.load(Blocks(0, [0], [1], hashes(1))) == (True, 0)


def test_damaged_object_fails_the_load(make, url, tmp_path):
    here, there = make(url, caches(3.0)), make(url, caches(0.0))
    here.save(Blocks(0, [0], [1], hashes(1)))
    here.side.close()
    pool = tmp_path / "kv"
    data = pool.read_bytes()
    at = data.index(np.float32(3.0).tobytes() * 64)
    with pool.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert there.load(Blocks(0, [0], [1], hashes(1))) == (True, 0)
    assert not there.layers["layer0"][1].any()


def test_epochs_have_objects_of_their_own(make, url):
    one = make(url, caches())
    one.save(Blocks(0, [0], [1], hashes(1)), epoch=b"old")
    assert one.load(Blocks(0, [0], [1], hashes(1)), epoch=b"new") == (True, 0)


def test_engine_goes_on_without_a_store(make, tmp_path, caplog):
    one = make(f"shm:{tmp_path}/none", caches())  # which no one has made, and it has no size
    assert one.save(Blocks(0, [0], [1], hashes(1)))
    assert one.load(Blocks(0, [0], [1], hashes(1))) == (True, 0)
    assert len([r for r in caplog.records if "could not be opened" in r.message]) == 1


@pytest.mark.parametrize("call", ["get_each", "put_each", "exists_each"])
def test_call_that_raises_is_reported(make, url, monkeypatch, call):
    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(TierStore, call, fail)
    one = make(url, caches())
    assert one.save(Blocks(0, [0], [1], hashes(1)))
    failed, _ = one.load(Blocks(0, [2], [1], hashes(1)))
    assert failed


def test_save_copies_before_it_reports_and_puts_after(make, url, monkeypatch):
    """What is stored is what the blocks were when they were saved."""
    go = threading.Event()
    put = TierStore.put_each

    def wait_then_put(*arguments):
        assert go.wait(30)
        return put(*arguments)

    monkeypatch.setattr(TierStore, "put_each", wait_then_put)
    here, there = make(url, caches(3.0)), make(url, caches(0.0))
    assert here.save(Blocks(0, [0], [1], hashes(1)))
    here.layers["layer0"].fill_(9.0)
    go.set()
    here.side.close()
    assert there.load(Blocks(0, [0], [1], hashes(1)))[0] is False
    assert (there.layers["layer0"][1] == 3.0).all()


def test_load_is_over_when_all_its_pieces_are(make, url, monkeypatch):
    monkeypatch.setattr(module, "STAGING_BYTES", 1)
    go, get = threading.Event(), TierStore.get_each

    def wait_for_the_second(store, names, *arguments):
        if names == object_names(b"", 0, hashes(2), [0]):
            assert go.wait(30)
        return get(store, names, *arguments)

    monkeypatch.setattr(TierStore, "get_each", wait_for_the_second)
    one = make(url, caches())
    one.save(Blocks(0, [0, 1], [1, 2], hashes(1, 2)))
    one.side._savers.shutdown(wait=True)
    loads = [Load("r", [Blocks(0, [0, 1], [1, 2], hashes(1, 2))])]
    one.side.start(Step("n", b"", loads, None))
    time.sleep(0.05)
    assert one.side.get_finished() == (set(), set())
    go.set()
    wait_for(lambda: one.side.get_finished() == ({"r"}, set()))
