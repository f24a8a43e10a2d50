"""The ledger: who is proposed, and the sums that always hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument
from mooncake_serving.dist_attention import Heartbeat, LoanLedger, Offer

NAMES = ("a", "b", "c", "d", "e")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return LoanLedger(max_candidates=3, stale_s=5.0, clock=clock)


def test_offers_are_sorted_by_free_memory_and_capped_at_three(ledger):
    for name, free in zip(NAMES, (90, 10, 40, 40, 20), strict=True):
        ledger.heartbeat(Heartbeat(name, 100, free))
    assert ledger.lenders("a", 5) == [Offer("c", 40), Offer("d", 40), Offer("e", 20)]
    assert ledger.lenders("a", 100) == [Offer("c", 40), Offer("d", 40), Offer("e", 20)]
    assert ledger.lenders("a", 101) == [], "the fourth is not asked"
    assert ledger.lenders("unknown", 1)[0] == Offer("a", 90)


def test_borrowing_instance_is_not_proposed(ledger):
    ledger.heartbeat(Heartbeat("a", 100, 90, num_borrowed=1))
    ledger.heartbeat(Heartbeat("b", 100, 10, lent={"a": 1}))
    assert ledger.lenders("c", 10) == [Offer("b", 10)]
    ledger.heartbeat(Heartbeat("a", 100, 90))
    assert ledger.lenders("c", 10) == [Offer("a", 90), Offer("b", 10)]


def test_instance_with_a_stale_heartbeat_is_left_out(ledger, clock):
    ledger.heartbeat(Heartbeat("a", 100, 50))
    clock.now = 5.0
    ledger.heartbeat(Heartbeat("b", 100, 40))
    assert [offer.instance for offer in ledger.lenders("c", 1)] == ["a", "b"]
    clock.now = 5.1
    assert [offer.instance for offer in ledger.lenders("c", 1)] == ["b"]
    ledger.heartbeat(Heartbeat("a", 100, 50))
    assert [offer.instance for offer in ledger.lenders("c", 1)] == ["a", "b"]


def test_forgotten_instance_takes_its_loans_along(ledger):
    ledger.heartbeat(Heartbeat("a", 100, 50, lent={"b": 7}))
    assert (ledger.balance("a"), ledger.balance("b")) == (7, -7)
    ledger.forget("a")
    ledger.forget("a")
    assert ledger.loans() == {} and ledger.balance("b") == 0 and ledger.lenders("b", 1) == []


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_free": -1}, "num_free and lent must be"),
        ({"num_free": 101}, "num_free and lent must be"),
        ({"lent": {"b": 51}}, "num_free and lent must be"),
        ({"num_borrowed": -1}, "num_free and lent must be"),
        ({"instance": 5}, "instance and the borrowers must be names, got 5"),
        ({"lent": {1: 2}}, "instance and the borrowers must be names, got 1"),
        ({"lent": [1]}, r"lent must be blocks by borrower, got \[1\]"),
        ({"lent": {"b": "1"}}, r"lent\['b'\] must be an integer, got '1'"),
        ({"num_blocks": 1.5}, "num_blocks must be an integer, got 1.5"),
        ({"num_free": True}, "num_free must be an integer, got True"),
        ({"num_borrowed": float("inf")}, "num_borrowed must be an integer, got inf"),
    ],
)
def test_wrong_heartbeat_is_rejected(changes, message):
    with pytest.raises(InvalidArgument, match=f"^Heartbeat: .*{message}"):
        Heartbeat(**{"instance": "a", "num_blocks": 100, "num_free": 50, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_candidates": 0}, "max_candidates must be at least 1, got 0"),
        ({"max_candidates": True}, "max_candidates must be an integer, got True"),
        ({"stale_s": float("inf")}, "stale_s must be positive and finite, got inf"),
        ({"stale_s": "5"}, "stale_s must be positive and finite, got '5'"),
    ],
)
def test_ledger_rejects_bad_options(changes, message):
    with pytest.raises(InvalidArgument, match=f"^LoanLedger: {message}"):
        LoanLedger(**changes)


def test_ledger_rejects_invalid_calls(ledger):
    with pytest.raises(InvalidArgument, match="^heartbeat: beat must be a Heartbeat, got None"):
        ledger.heartbeat(None)
    for bad in (True, 1.5, "1"):
        with pytest.raises(InvalidArgument, match="^lenders: num_blocks must be an integer"):
            ledger.lenders("a", bad)


def test_loan_of_zero_blocks_is_rejected(ledger):
    with pytest.raises(InvalidArgument, match="^lenders: num_blocks must be at least 1, got 0"):
        ledger.lenders("a", 0)


@st.composite
def beats(draw):
    name, num_blocks = draw(st.sampled_from(NAMES)), draw(st.integers(0, 50))
    left, lent = num_blocks, {}
    for borrower in draw(st.sets(st.sampled_from(NAMES))) - {name}:
        lent[borrower] = draw(st.integers(0, left))
        left -= lent[borrower]
    return Heartbeat(name, num_blocks, draw(st.integers(0, left)), lent, draw(st.integers(0, 3)))


@given(st.lists(beats(), max_size=12), st.sampled_from(NAMES), st.integers(1, 80))
def test_ledger_invariants_hold_for_any_heartbeats(history, borrower, num_blocks):
    ledger = LoanLedger(clock=lambda: 0.0)
    latest = {}
    for beat in history:
        ledger.heartbeat(beat)
        latest[beat.instance] = beat
    assert sum(map(ledger.balance, NAMES)) == 0
    for (_, lender), count in ledger.loans().items():
        assert 0 < count <= latest[lender].num_blocks
    offers = ledger.lenders(borrower, num_blocks)
    assert offers == sorted(offers, key=lambda o: (-o.num_blocks, o.instance)) and len(offers) <= 3
    for offer in offers:
        beat = latest[offer.instance]
        assert offer.instance != borrower and not beat.num_borrowed
        assert offer.num_blocks + sum(beat.lent.values()) <= beat.num_blocks
    assert not offers or sum(offer.num_blocks for offer in offers) >= num_blocks
    for name in NAMES:
        ledger.forget(name)
    assert ledger.loans() == {} and ledger.lenders(borrower, 1) == []
