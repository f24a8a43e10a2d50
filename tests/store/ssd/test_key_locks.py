"""Who holds objects that move between the tiers: also after a wait for them was interrupted."""

import threading

import pytest

from mooncake_kernels.pool import Key
from mooncake_serving.store.tiered.demotion import KeyLocks

from .tiered import IN_POOL, KEYS, put, read

KEY, OTHER = (1, 0), (2, 0)


class Interrupted(threading.Condition):
    """Ctrl-C arrives in a wait, or just after the lock was released, the first time only."""

    def __init__(self, where: str):
        super().__init__()
        self._where = where

    def wait(self, timeout=None):
        self._interrupt("wait")
        return super().wait(timeout)

    def __exit__(self, *error):
        super().__exit__(*error)
        self._interrupt("release")

    def _interrupt(self, where: str) -> None:
        if where == self._where:
            self._where = ""
            raise KeyboardInterrupt


def is_free(locks: KeyLocks, *keys: Key) -> bool:
    """Whether another thread gets these keys, or all if there are none."""

    def take():
        with locks.hold(keys) if keys else locks.hold_all():
            pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


@pytest.mark.parametrize("call", ["hold", "hold_all"])
@pytest.mark.parametrize("where", ["wait", "release"])
def test_an_interrupted_call_holds_nothing(call, where):
    locks = KeyLocks()

    def hold():
        with locks.hold([KEY]) if call == "hold" else locks.hold_all():
            pytest.fail("it was interrupted before that")

    if where == "release":
        locks._changed = Interrupted(where)
        with pytest.raises(KeyboardInterrupt):
            hold()
    else:
        with locks.hold([KEY]):
            locks._changed = Interrupted(where)
            with pytest.raises(KeyboardInterrupt):
                hold()
            assert is_free(locks, OTHER)
    assert is_free(locks, KEY) and is_free(locks)


def test_interrupted_remove_all_leaves_the_store_usable(opened):
    store = opened()
    put(store, *KEYS)
    assert store.flush()
    with store._moving.hold([KEY]):  # as a promotion from a slow disk
        store._moving._changed = Interrupted("wait")
        with pytest.raises(KeyboardInterrupt):
            store.remove_all()
    assert is_free(store._moving, OTHER) and is_free(store._moving)
    assert read(store, *KEYS) and sum(store.exists_each(KEYS)) >= IN_POOL
    assert store.remove_all() > 0 and not store.exists_each(KEYS).any()
