"""A pool, and a caller's memory that is truncated or protected: an error, and the pool is well."""

import pytest

from ..transfer.scripts import run_fork
from ..transfer.test_transfer_memory_forked import COMMON

SCRIPT = """
import errno
from mooncake_kernels.pool import ObjectPool

def refuses(call):
    try:
        call()
    except OSError as error:
        assert error.errno == errno.EFAULT and "memory is not accessible" in str(error), error
    else:
        raise AssertionError("it succeeded")

mine, whole = Memory(5), np.zeros(SIZE, np.uint8)
with ObjectPool.create(4 * SIZE) as pool:
    for checksum in (True, False):
        pool.put_from((1, checksum), mine.bytes, checksum=checksum)
    mine.spoil({how!r})
    for checksum in (True, False):
        if {how!r} != "read-only":
            refuses(lambda: pool.put_from((2, 2), mine.bytes, checksum=checksum))
        refuses(lambda: pool.get_into((1, checksum), mine.bytes, verify=checksum))
        pool.get_into((1, checksum), whole)
        assert (whole == 5).all()
    stats = pool.stats()
    assert (stats.num_ready, stats.num_writing, stats.num_pins) == (2, 0, 0), stats
"""


@pytest.mark.parametrize("how", ["truncated", "protected", "read-only"])
def test_inaccessible_buffers_raise_efault(how):
    assert run_fork(COMMON + SCRIPT.format(how=how)) == (0, "")
