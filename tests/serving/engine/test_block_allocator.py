"""The allocator never gives a block to two owners, and never loses one."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_serving.engine import BlockAllocator, OutOfBlocks

NUM_BLOCKS = 12


class AllocatorMachine(RuleBasedStateMachine):
    """Drive the allocator at random next to the plainest model: a list of holdings."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count):
        in_use = {block_id for ids in self.held for block_id in ids}
        if count > NUM_BLOCKS - len(in_use):
            with pytest.raises(OutOfBlocks, match=f"got {count}"):
                self.allocator.allocate(count)
            return
        ids = self.allocator.allocate(count)
        assert len(set(ids)) == count
        assert not in_use & set(ids)
        self.held.append(ids)

    @rule(data=st.data())
    def share(self, data):
        if self.held:
            ids = data.draw(st.sampled_from(self.held))
            self.allocator.share(ids)
            self.held.append(list(ids))

    @rule(data=st.data())
    def free(self, data):
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.allocator.free(self.held.pop(index))

    @invariant()
    def counts_agree(self):
        in_use = {block_id for ids in self.held for block_id in ids}
        assert self.allocator.num_free == NUM_BLOCKS - len(in_use)
        assert all(self.allocator.is_allocated(b) == (b in in_use) for b in range(NUM_BLOCKS))


TestAllocator = AllocatorMachine.TestCase


def test_a_failed_allocation_takes_nothing():
    allocator = BlockAllocator(3)
    with pytest.raises(OutOfBlocks, match="at most the 3 free blocks of 3, got 4"):
        allocator.allocate(4)
    assert allocator.num_free == 3


@pytest.mark.parametrize("bad", [[0, 7], [0, -1], [0, 2]])
def test_freeing_an_unallocated_block_frees_nothing(bad):
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=r"free: block_ids\[1\] must be an allocated block, got"):
        allocator.free(bad)
    assert allocator.num_free == 2


def test_a_double_free_is_detected():
    allocator = BlockAllocator(4)
    [block_id] = allocator.allocate(1)
    with pytest.raises(ValueError, match=f"block {block_id} is freed more often than it is held"):
        allocator.free([block_id, block_id])
    allocator.free([block_id])
    with pytest.raises(ValueError, match="must be an allocated block"):
        allocator.free([block_id])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_bad_sizes_are_rejected(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks must be positive, got {num_blocks}"):
        BlockAllocator(num_blocks)
    with pytest.raises(ValueError, match="allocate: num_blocks must not be negative, got -1"):
        BlockAllocator(1).allocate(-1)
