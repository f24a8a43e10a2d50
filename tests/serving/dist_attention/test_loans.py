"""The book of what is lent: blocks are lent once, come back, and belong to their borrower."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_serving.dist_attention.engine.blocks import SharedAllocator
from mooncake_serving.dist_attention.errors import Refusal
from mooncake_serving.dist_attention.loans import Loans

DEBTORS = st.sampled_from(["a", "b"])
NUMBERS = st.integers(0, 3)


class Book(RuleBasedStateMachine):
    """Compare with a dict, under a clock that only rules move."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.blocks = SharedAllocator(12)
        self.loans = Loans(self.blocks, max_lent_blocks=8, lease_s=10, clock=lambda: self.now)
        self.own: list[int] = []  # taken by the instance itself
        self.model: dict[tuple[str, int], tuple[int, float]] = {}  # blocks, when renewed

    @rule(borrower=DEBTORS, number=NUMBERS, count=st.integers(0, 9))
    def reserve(self, borrower, number, count):
        lent = sum(blocks for blocks, _ in self.model.values())
        fits = 1 <= count <= min(8 - lent, 12 - lent - len(self.own))
        if fits and (borrower, number) not in self.model:
            loan = self.loans.reserve(borrower, number, count)
            assert len(set(loan.block_ids)) == count and loan.stored_ids == []
            self.model[borrower, number] = (count, self.now)
        else:
            with pytest.raises(Refusal):
                self.loans.reserve(borrower, number, count)

    def is_leased(self, borrower, number):
        return self.now - 10 <= self.model.get((borrower, number), (0, -100))[1]

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds):
        """An instance that was stopped has not ended its loans yet."""
        self.now += seconds

    @rule(borrower=DEBTORS, number=NUMBERS)
    def use(self, borrower, number):
        if self.is_leased(borrower, number):
            count, _ = self.model[borrower, number]
            assert len(self.loans.use(borrower, number).block_ids) == count
            self.model[borrower, number] = (count, self.now)
        else:
            with pytest.raises(Refusal, match=f"loan {number} must be one of {borrower}"):
                self.loans.use(borrower, number)

    @rule(borrower=DEBTORS, numbers=st.lists(NUMBERS).map(tuple))
    def renew(self, borrower, numbers):
        leased = [number for number in numbers if self.is_leased(borrower, number)]
        assert self.loans.renew(borrower, numbers) == leased
        for number in numbers:
            if self.is_leased(borrower, number):
                self.model[borrower, number] = (self.model[borrower, number][0], self.now)

    @rule(borrower=DEBTORS, number=NUMBERS)
    def free(self, borrower, number):
        was_there = self.model.pop((borrower, number), None) is not None
        assert self.loans.free(borrower, number) == was_there

    @rule(borrower=DEBTORS)
    def free_all(self, borrower):
        self.loans.free_all(borrower)
        self.model = {key: value for key, value in self.model.items() if key[0] != borrower}

    @rule(seconds=st.integers(1, 15))
    def expire(self, seconds):
        self.now += seconds
        gone = {key for key, (_, at) in self.model.items() if at < self.now - 10}
        assert self.loans.free_expired() == {borrower for borrower, _ in gone}
        for key in gone:
            del self.model[key]

    @rule(count=st.integers(0, 6))
    def take_own(self, count):
        self.own += self.blocks.take(count) or []

    @rule()
    def give_own_back(self):
        self.blocks.give_back(self.own)
        self.own = []

    @invariant()
    def counts_agree(self):
        lent = {}
        for (borrower, _), (count, _) in self.model.items():
            lent[borrower] = lent.get(borrower, 0) + count
        assert self.loans.lent() == lent and self.loans.num_lent == sum(lent.values()) <= 8
        assert self.blocks.num_free == 12 - self.loans.num_lent - len(self.own)
        assert self.loans.num_free == min(self.blocks.num_free, 8 - self.loans.num_lent)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=60, deadline=None, stateful_step_count=30)
