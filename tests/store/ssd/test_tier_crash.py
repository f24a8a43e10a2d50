"""A tier whose host dies between any two of its writes, and whose process is killed.

``--soak`` makes it 100 kills at random moments instead of 4, and every write instead of 40.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd import disk

from ..support import child, kill
from .support import PAGE, keys_of, open_tier, put, read, size_of

SIZE = 4


class Recorder:
    """What a disk was asked to write, and when it was synced."""

    def __init__(self, monkeypatch):
        self.events = []  # (offset, bytes), or None: a sync
        real_write = disk.Disk.write

        def write(own, offset, start, num_bytes):
            self.events.append((offset, own.staging[start : start + num_bytes].tobytes()))
            return real_write(own, offset, start, num_bytes)

        def synced(real):
            def sync(own):
                real(own)
                self.events.append(None)

            return sync

        monkeypatch.setattr(disk.Disk, "write", write)
        for name in ("sync", "sync_name"):  # the latter once the head of the file is written
            monkeypatch.setattr(disk.Disk, name, synced(getattr(disk.Disk, name)))


@dataclass
class Round:
    """What holds after some puts, reads, removals and syncs.

    Attributes:
        num_events: so far.
        there: the keys of what the tier has.
        must: those of what was synced, and not dropped or removed since.
        gone: those of what was removed before the last sync.
    """

    num_events: int = 0
    there: set = field(default_factory=set)
    must: set = field(default_factory=set)
    gone: set = field(default_factory=set)


def run(tier, recorder) -> list[Round]:
    """Do so over some laps."""
    chance = random.Random(1)
    rounds, removed = [Round(len(recorder.events))], set()
    for i in range(60):
        must, gone = rounds[-1].must, rounds[-1].gone
        assert put(tier, *((3 * i + j, 0) for j in range(3))) == [PutResult.STORED] * 3
        there = sorted(keys_of(tier))
        if i % 2:
            read(tier, *chance.sample(there, 2))
        if i % 5 == 0:
            removed.add(key := chance.choice(there))
            assert tier.remove(key)
        if i % 3 == 0:
            tier.sync()
            must, gone = keys_of(tier), set(removed)
        there = keys_of(tier)
        rounds.append(Round(len(recorder.events), there, must & there, gone))
    return rounds


def power_loss(image: bytearray, events: list, is_kept: Callable[[int], bool]) -> bytes:
    """The file if of what was not synced some pages are there, by their places, and others not."""
    last_sync = max((i for i, event in enumerate(events) if event is None), default=-1)
    for i, event in enumerate(events):
        if event is not None:
            offset, data = event
            for at in range(0, len(data), PAGE):
                if i < last_sync or is_kept(offset + at):
                    image[offset + at : offset + at + PAGE] = data[at : at + PAGE]
    return bytes(image)


def half(chance: random.Random) -> Callable[[int], bool]:
    """Pages are kept by chance."""
    return lambda place: chance.random() < 0.5


def test_power_loss_after_any_write(tmp_path, monkeypatch, soak):
    """What was synced, and not dropped since, is there, and what was removed is not."""
    path, copy = tmp_path / "tier", tmp_path / "copy"
    recorder = Recorder(monkeypatch)
    with open_tier(path, SIZE) as tier:
        blank = bytearray(path.stat().st_size)
        rounds = run(tier, recorder)
        assert tier.stats().num_buckets_begun > 3 * SIZE and tier.stats().num_moved
    monkeypatch.undo()
    chance = random.Random(2)
    moments = range(rounds[0].num_events + 1, rounds[-1].num_events + 1)
    for moment in moments if soak else chance.sample(moments, 40):
        number = next(i for i, r in enumerate(rounds) if r.num_events >= moment)
        before, after = rounds[number - 1], rounds[number]
        copy.write_bytes(power_loss(blank[:], recorder.events[:moment], half(chance)))
        with open_tier(copy, SIZE) as tier:
            found = keys_of(tier)
            assert read(tier, *found, verify=False) == found
            assert before.must & after.there <= found, moment
            assert found <= {(i, 0) for i in range(3 * number)} - before.gone, moment
            assert put(tier, (1000, 0)) == [PutResult.STORED]  # and it goes on


def test_power_loss_twice(tmp_path, monkeypatch, soak):
    """What the first loss took does not come back by the second."""
    path, copy, chance = tmp_path / "tier", tmp_path / "copy", random.Random(5)
    recorder = Recorder(monkeypatch)
    with open_tier(path, SIZE) as tier:
        blank = bytearray(path.stat().st_size)
        rounds = run(tier, recorder)
    events = recorder.events
    moments = range(rounds[0].num_events + 1, rounds[-1].num_events + 1)
    for moment in moments if soak else moments[:60]:  # of the first lap, with heads that are new
        image = power_loss(blank[:], events[:moment], half(chance))
        copy.write_bytes(image)
        recorder.events = []
        with open_tier(copy, SIZE) as tier:
            found = keys_of(tier)
            new = [(key, 1) for key in chance.choices(range(100), k=chance.randrange(1, 4))]
            put(tier, *new)
            second = list(recorder.events)
        copy.write_bytes(power_loss(bytearray(image), second, half(chance)))
        with open_tier(copy, SIZE) as tier:
            assert read(tier, *(there := keys_of(tier)), verify=False) == there
            assert there <= found | set(new), moment


def life(path, report: int, start: int, num_buckets: int) -> None:
    with open_tier(path, num_buckets) as tier:
        for i in range(start, 100_000):
            put(tier, *((i, j) for j in range(3)))
            if i % 4 == 0:
                tier.sync()
                os.write(report, i.to_bytes(8, "little"))
            if i % 7 == 0:
                read(tier, (i - 5, 0), (i - 2, 1))


@pytest.mark.parametrize("num_buckets", [4, 256], ids=["over laps", "with room for all"])
def test_killed_writer_loses_no_synced_objects(tmp_path, soak, num_buckets):
    """Killed again and again: what it said that it has synced is there, and each byte of it."""
    path, start, chance = tmp_path / "tier", 0, random.Random()
    for _ in range(100 if soak else 4):
        reads, reports = os.pipe()
        with child(lambda start=start, out=reports: life(path, out, start, num_buckets)) as pid:
            os.close(reports)
            acknowledged = os.read(reads, 8)  # it lives
            for _ in range(chance.randrange(8)):
                acknowledged = os.read(reads, 8)
            time.sleep(chance.random() * 0.005)  # anywhere in what it does
            kill(pid)
        with contextlib.closing(os.fdopen(reads, "rb")) as rest:
            acknowledged = (acknowledged + rest.read())[-8:]
        last = int.from_bytes(acknowledged, "little")
        with open_tier(path, num_buckets) as tier:
            keys = [(i, j) for i in range(last + 40) for j in range(3)]
            found = read(tier, *keys, verify=False)
            assert found == keys_of(tier)
            if num_buckets > 4:
                assert found >= {(i, j) for i in range(last + 1) for j in range(3)}
            assert max(found) >= (last, 0)  # also over laps: the oldest go first
            stats = tier.stats()
            assert stats.live_bytes == sum(map(size_of, found))
        start = last + 1
        if num_buckets > 4 and stats.num_buckets_begun > 200:  # it is almost full
            path.unlink()
            start = 0


def test_data_of_another_tier_is_not_recovered(tmp_path):
    """As if a file were made anew where an old one was."""
    path = tmp_path / "tier"
    with open_tier(path, SIZE) as tier:
        put(tier, (1, 0), (2, 0))
        image = np.frombuffer(path.read_bytes(), np.uint8)
    path.unlink()
    with open_tier(path, SIZE):
        pass
    whole = np.fromfile(path, np.uint8)
    whole[PAGE:] = image[PAGE:]
    whole.tofile(path)
    with open_tier(path, SIZE) as tier:
        assert keys_of(tier) == set()
