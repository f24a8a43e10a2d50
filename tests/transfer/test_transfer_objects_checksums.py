"""Objects that are read are compared with their checksums."""

import numpy as np
import pytest

from .objects import (
    DAMAGED,
    here_fixture,  # noqa: F401
    key,
    keys,
    place,
)
from .proxy import Proxy
from .support import untouched


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("compare", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_intact_objects_match_their_checksums(here, sums, compare, verify):
    objects = [here.put(1, 100_000), here.put(2, 100_000, checksum=False)]
    options = {"sums": sums, "compare": compare, "verify": verify}
    assert here.read(1, 2, **options) == [data.tobytes() for data in objects]
    ranges = {"offsets": [9, 9], "sizes": [50_000, 50_000]}
    expected = [data[9:50_009].tobytes() for data in objects]
    assert here.read(1, 2, **ranges, **options) == expected


@pytest.mark.parametrize("sums", [True, False])
def test_damaged_objects_are_detected(here, sums):
    good, bad = here.put(1, 5000), here.put(2, 5000)
    here.damage(2, 4000)
    bad[4000] ^= 1
    assert here.read(1, 2, sums=sums) == [good.tobytes(), False]
    assert here.read(1, 2, sums=sums, verify=False) == [good.tobytes(), bad.tobytes()]
    assert here.read(1, 2, 1, sums=sums, compare=True) == [good.tobytes(), DAMAGED, good.tobytes()]
    with here.ask(2, compare=True) as reply:
        assert reply.object_bytes.tolist() == [5000]
    # Of a range, the whole object is compared; else its sum is of what is there.
    ranges = {"offsets": [0], "sizes": [100]}
    assert here.read(2, sums=sums, compare=True, **ranges) == [DAMAGED]
    assert here.read(2, sums=sums, **ranges) == [bad[:100].tobytes()]
    assert here.pool.counts().num_hits == 7


def test_damage_that_no_one_can_see(here):
    data = here.put(1, 5000, checksum=False)
    here.damage(1)
    data[0] ^= 1
    assert here.read(1, compare=True) == [data.tobytes()]


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_corruption_in_transit_is_detected(here, num_pieces):
    here.put(1, 300)
    with Proxy(here.far.name, alter_down=lambda data: data.replace(b"needle", b"noodle")) as proxy:
        with here.near.open(proxy.name) as peer:
            data = np.frombuffer(b"in a haystack a needle is lost", np.uint8)
            here.pool.put_from(key(2), data)
            here.pool.put_from(key(3), data, checksum=False)
            for number, sums, right in ((2, True, False), (2, False, False), (3, True, False)):
                with here.near.read_objects(peer, keys(1, number), sums=sums) as reply:
                    got = untouched(data.nbytes)
                    pieces = [place(part)[0] for part in np.array_split(got, num_pieces)]
                    assert reply.receive([[], pieces], verify=True).tolist() == [True, right]
                    assert got.tobytes() == data.tobytes().replace(b"needle", b"noodle")
            with here.near.read_objects(peer, keys(3), sums=False) as reply:
                assert reply.receive([place(got)], verify=True).all()  # it has nothing to compare
