"""The book of what is lent: blocks are lent once, come back, and belong to their debtor."""

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

    @rule(debtor=DEBTORS, number=NUMBERS, count=st.integers(0, 9))
    def reserve(self, debtor, number, count):
        lent = sum(blocks for blocks, _ in self.model.values())
        fits = 1 <= count <= min(8 - lent, 12 - lent - len(self.own))
        if fits and (debtor, number) not in self.model:
            loan = self.loans.reserve(debtor, number, count)
            assert len(set(loan.block_ids)) == count and loan.stored_ids == []
            self.model[debtor, number] = (count, self.now)
        else:
            with pytest.raises(Refusal):
                self.loans.reserve(debtor, number, count)

    def is_leased(self, debtor, number):
        return self.now - 10 <= self.model.get((debtor, number), (0, -100))[1]

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds):
        """An instance that was stopped has not ended its loans yet."""
        self.now += seconds

    @rule(debtor=DEBTORS, number=NUMBERS)
    def use(self, debtor, number):
        if self.is_leased(debtor, number):
            count, _ = self.model[debtor, number]
            assert len(self.loans.use(debtor, number).block_ids) == count
            self.model[debtor, number] = (count, self.now)
        else:
            with pytest.raises(Refusal, match=f"loan {number} must be one of {debtor}"):
                self.loans.use(debtor, number)

    @rule(debtor=DEBTORS, numbers=st.lists(NUMBERS).map(tuple))
    def renew(self, debtor, numbers):
        leased = [number for number in numbers if self.is_leased(debtor, number)]
        assert self.loans.renew(debtor, numbers) == leased
        for number in numbers:
            if self.is_leased(debtor, number):
                self.model[debtor, number] = (self.model[debtor, number][0], self.now)

    @rule(debtor=DEBTORS, number=NUMBERS)
    def free(self, debtor, number):
        was_there = self.model.pop((debtor, number), None) is not None
        assert self.loans.free(debtor, number) == was_there

    @rule(debtor=DEBTORS)
    def free_all(self, debtor):
        self.loans.free_all(debtor)
        self.model = {key: value for key, value in self.model.items() if key[0] != debtor}

    @rule(seconds=st.integers(1, 15))
    def expire(self, seconds):
        self.now += seconds
        gone = {key for key, (_, at) in self.model.items() if at < self.now - 10}
        assert self.loans.free_expired() == {debtor for debtor, _ in gone}
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
        for (debtor, _), (count, _) in self.model.items():
            lent[debtor] = lent.get(debtor, 0) + count
        assert self.loans.lent() == lent and self.loans.num_lent == sum(lent.values()) <= 8
        assert self.blocks.num_free == 12 - self.loans.num_lent - len(self.own)
        assert self.loans.num_free == min(self.blocks.num_free, 8 - self.loans.num_lent)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=60, deadline=None, stateful_step_count=30)
