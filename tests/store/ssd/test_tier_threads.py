"""Readers while buckets are reused under them, and concurrent writers."""

import random
import threading

import numpy as np

from mooncake_kernels.pool import PutResult
from mooncake_serving.store.ssd.disk import Reader

from ...threads import in_threads
from .support import keys_of, open_tier, put, read, size_of, value


def test_readers_never_see_bytes_of_another_object(path, soak):
    """Three threads read without comparing checksums, while two write over lap after lap."""
    num_puts, over = 2000 if soak else 120, threading.Event()
    with open_tier(path, 3, num_slots=2) as tier:
        num_read = [0, 0, 0]

        def reader(number):
            chance = random.Random(number)
            while not over.is_set() or not num_read[number]:
                there = sorted(keys_of(tier))
                keys = chance.sample(there, min(4, len(there)))
                num_read[number] += len(read(tier, *keys, verify=False))

        def writer(number):
            for i in range(num_puts):
                assert put(tier, (i, number)) == [PutResult.STORED]
                if i % 9 == 0:
                    tier.remove((i, number))

        def writers():
            try:
                in_threads(lambda: writer(100), lambda: writer(200))
            finally:
                over.set()

        in_threads(*(lambda i=i: reader(i) for i in range(3)), writers)
        stats = tier.stats()
        assert all(num_read) and stats.num_dropped and stats.num_buckets_begun > 9
        assert stats.num_damaged == stats.num_write_errors == 0


def test_bucket_is_not_reused_while_being_read(path, monkeypatch):
    """A read that has begun stays right, however long it takes: the writer waits for it."""
    key, begun, goes_on = (7, 0), threading.Event(), threading.Event()
    real = Reader.read_each

    def slow(own, ranges):
        if threading.current_thread() is reader:
            begun.set()
            assert goes_on.wait(60)
        return real(own, ranges)

    with open_tier(path, 3, move_ratio=0, deadline_s=60) as tier:
        put(tier, key)
        monkeypatch.setattr(Reader, "read_each", slow)
        got = np.zeros(size_of(key), np.uint8)
        reader = threading.Thread(target=lambda: tier.get_into_each([key], [got], verify=False))
        reader.start()
        assert begun.wait(60)
        written = []

        def write():
            for i in range(100, 140):
                assert put(tier, (i, 0)) == [PutResult.STORED]
                written.append(i)

        writer = threading.Thread(target=write)
        writer.start()
        while key in keys_of(tier):  # then its bucket is free, and soon to be written
            assert writer.is_alive()
        goes_on.set()
        reader.join()
        writer.join()
        assert len(written) == 40
        np.testing.assert_array_equal(got, value(key))


def test_one_of_many_writers_of_a_key_wins(path):
    with open_tier(path) as tier:
        results = []
        in_threads(*[lambda: results.extend(put(tier, (1, 0), (2, 0), (3, 0)))] * 6)
        assert results.count(PutResult.STORED) == 3
        assert results.count(PutResult.EXISTS) == 15 and len(keys_of(tier)) == 3


def test_close_waits_for_readers(path, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    real = Reader.read_each

    def slow(own, ranges):
        begun.set()
        assert goes_on.wait(60)
        return real(own, ranges)

    tier = open_tier(path)
    put(tier, (7, 0))
    monkeypatch.setattr(Reader, "read_each", slow)

    def close():
        assert begun.wait(60)
        threading.Timer(0.05, goes_on.set).start()
        tier.close()
        assert goes_on.is_set()

    in_threads(lambda: read(tier, (7, 0)), close)
