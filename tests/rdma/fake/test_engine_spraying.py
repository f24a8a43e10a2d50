"""The engine over NICs of unequal speed: each gets what it can move, as measured."""

import threading

import pytest

from .engines import Engines, engines

MIB = 1 << 20
SIZE = 16 * MIB
FAST = 80 * MIB  # bytes a second: far less than the machine can do
NICS = ("fake0", "fake1")


def set_speeds(world, *speeds: int) -> None:
    for index, speed in enumerate(speeds):
        world.set_device(index, bytes_per_s=speed)


def shares(pair: Engines, direction: str = "write") -> list[int]:
    """Moves everything; how many bytes of it each NIC has moved."""
    field = "num_bytes_written" if direction == "write" else "num_bytes_read"

    def moved() -> list[int]:
        paths = pair.near.stats()["paths"][pair.far.name]
        return [paths[name][field] for name in NICS]

    before = moved()
    pair.move(direction, [(0, 0, SIZE)])
    found = [count - earlier for count, earlier in zip(moved(), before, strict=True)]
    assert sum(found) == SIZE
    return found


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("slow", [0, 1])
def test_slow_nic_gets_a_smaller_share(world, direction, slow):
    """Once it has been measured; the ports of both claim the same speed."""
    speeds = [FAST, FAST]
    speeds[slow] = FAST // 4
    set_speeds(world, *speeds)
    with engines(SIZE) as pair:
        shares(pair, direction)
        moved = shares(pair, direction)
        assert 0 < moved[slow] < moved[1 - slow] / 2


def test_very_slow_nic_is_not_overloaded(world):
    """However slow: one of 2 MiB/s looked as fast as one of 10."""
    set_speeds(world, FAST // 40, FAST // 5)
    with engines(SIZE) as pair:
        shares(pair)
        slow, _ = shares(pair)
        assert slow <= SIZE / 8


@pytest.mark.parametrize("times", [4, 16])
def test_recovered_nic_regains_its_share(world, times):
    """Even if it was so slow that it got nothing, and was not measured any more."""
    set_speeds(world, FAST // times, FAST)
    with engines(SIZE) as pair:
        shares(pair)
        slow, fast = shares(pair)
        assert slow < fast / 2
        set_speeds(world, FAST, FAST)
        assert any(shares(pair)[0] > SIZE / 3 for _ in range(30))


def test_nic_that_slows_down_loses_its_share(world):
    set_speeds(world, FAST, FAST)
    with engines(SIZE) as pair:
        assert min(shares(pair)) > SIZE / 4
        set_speeds(world, FAST // 4, FAST)
        assert any(slow < fast / 2 for slow, fast in (shares(pair) for _ in range(10)))


def test_an_idle_nic_gets_more_than_a_busy_one(world):
    """Which another engine's requests keep busy: of these ours sees nothing but the speed."""
    set_speeds(world, FAST, FAST)
    is_over = threading.Event()

    def keep_busy(other: Engines) -> None:
        while not is_over.is_set():
            other.write([(0, 0, SIZE)]).wait()

    with engines(SIZE) as pair, engines(SIZE, near=NICS[:1], far=("fake3",)) as other:
        assert min(shares(pair)) > SIZE / 4
        thread = threading.Thread(target=keep_busy, args=[other])
        thread.start()
        try:
            found = [shares(pair) for _ in range(4)]
        finally:
            is_over.set()
            thread.join()
        busy, idle = found[-1]
        assert busy < idle
