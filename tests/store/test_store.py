"""``Store``: what it is called with."""

import numpy as np
import pytest
import torch

from mooncake_serving.store import Store

UNIT = 4096


@pytest.fixture
def store():
    with Store.create(64 * UNIT) as made:
        yield made


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_buffers_may_be_rows_of_one_array(store, make):
    values = np.random.default_rng(0).random((3, 100))
    store.put_each([1, 2, 3], values)
    rows = make((3, 100), dtype=torch.float64 if make is torch.zeros else np.float64)
    assert store.get_into_each([1, 2, 3], rows).tolist() == [800] * 3
    assert np.array_equal(rows, values)
