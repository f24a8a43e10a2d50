"""FrequencySketch: never below the true count, seldom above it, and old uses fade."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.pool import object_keys
from mooncake_serving.store.tiered.tiered_room import MAX_COUNT, FrequencySketch

WORD = st.integers(0, 2**64 - 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(WORD, WORD), min_size=1, max_size=60))
def test_sketch_never_underestimates(keys):
    sketch = FrequencySketch(64)
    for key in keys:
        sketch.add(np.array([key], np.uint64))
    counts = {key: keys.count(key) for key in keys}
    estimates = sketch.estimate(np.array(list(counts), np.uint64))
    assert (estimates >= np.minimum(list(counts.values()), MAX_COUNT)).all()


def test_sketch_rarely_overestimates_sequential_keys():
    sketch = FrequencySketch(10_000)
    keys = object_keys(np.arange(20_000), "model")
    sketch.add(keys[:10_000])
    sketch.add(keys[:1000])
    assert (sketch.estimate(keys[:1000]) == 2).mean() > 0.99
    assert (sketch.estimate(keys[1000:10_000]) == 1).mean() > 0.99
    assert (sketch.estimate(keys[10_000:]) == 0).mean() > 0.99
    assert len(sketch.estimate(keys[:0])) == 0


def test_old_uses_fade():
    sketch = FrequencySketch(256)
    keys = object_keys(np.arange(256), "model")
    for _ in range(20):
        sketch.add(keys[:1])
    assert sketch.estimate(keys[:1])[0] == MAX_COUNT
    for _ in range(8 * 4):
        sketch.add(keys[1:])
    assert sketch.estimate(keys[:1])[0] <= 2
