"""What a tiered store sees of its disk, while removals are recorded by several threads."""

import threading

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_serving.store.tiered.disk_view import DiskView

from .support import open_tier

KEY = (1, 0)


@pytest.mark.parametrize("call", ["remove", "retry"])
def test_object_put_after_removal_survives_concurrent_retry(tmp_path, monkeypatch, call):
    with open_tier(tmp_path / "tier") as tier, ObjectPool.create(1 << 20) as pool:
        disk, begun, goes_on = DiskView(tier, pool), threading.Event(), threading.Event()
        assert disk.put_each([KEY], [b"old"], lambda _: 1) == [PutResult.STORED]
        disk.condemn([KEY])
        real = tier.remove

        def remove(key):
            if not begun.is_set():
                begun.set()
                assert goes_on.wait(60)
            return real(key)

        monkeypatch.setattr(tier, "remove", remove)
        first = threading.Thread(target=disk.remove, args=(KEY,))
        if call == "retry":
            first = threading.Thread(target=disk.retry)
        first.start()
        assert begun.wait(60)

        def replace():
            disk.retry()
            assert disk.put_each([KEY], [b"new"], lambda _: 2) == [PutResult.STORED]

        second = threading.Thread(target=replace)
        second.start()
        second.join(0.5)  # if it does not wait for the first
        goes_on.set()
        first.join(60)
        second.join(60)
        found = np.zeros(3, np.uint8)
        assert disk.get_into_each(np.array([KEY], np.uint64), [found]).tolist() == [3]
        assert found.tobytes() == b"new"
