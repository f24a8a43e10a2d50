"""Nonexistent instances, and impossible numbers of them."""

import math

import numpy as np
import pytest

from mooncake_serving.conductor import Cluster, InvalidArgument, PrefixIndex, Role

from .support import make


@pytest.mark.parametrize("instance", [-1, 99, None, 1.0, True, "a"])
def test_unknown_instance_neither_fails_nor_recovers(instance):
    conductor = make()
    up = conductor.cluster.up.copy()
    for call in (conductor.failed, conductor.recovered):
        with pytest.raises(InvalidArgument, match=r"instance must be in \[0, \d+\), got"):
            call(instance)
    assert np.array_equal(conductor.cluster.up, up)


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_tokens": -1},
        {"capacity_tokens": math.nan},
        {"capacity_tokens": [1, 2, 3]},
        {"max_batch_size": 0},
        {"max_batch_size": None},
    ],
)
def test_bad_cluster_sizes_are_rejected(options):
    [name] = options
    with pytest.raises(InvalidArgument, match=f"Cluster: {name} must be an integer of at least"):
        Cluster([Role.PREFILL, Role.DECODE], **options)


@pytest.mark.parametrize("num_instances", [0, None, "a", math.nan])
def test_index_requires_at_least_one_instance(num_instances):
    with pytest.raises(
        InvalidArgument, match="PrefixIndex: num_instances must be (at least 1|an integer), got"
    ):
        PrefixIndex(num_instances)


def test_an_index_of_many_instances_takes_no_memory_for_them():
    index = PrefixIndex(1_000_000)
    index.add(999_999, [1, 2])
    assert index.match([1, 2, 3])[999_999] == 2
