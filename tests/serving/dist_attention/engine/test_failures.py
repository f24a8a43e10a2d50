"""Lenders that fail while they hold keys and values of requests."""

import pytest

from mooncake_serving.dist_attention import LoanOptions
from mooncake_serving.dist_attention.engine import LoansLost
from mooncake_serving.engine import SamplingParams
from tests.waiting import eventually

from .test_engine import PARAMS, prompt_of, run, tokens

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


def lender_of(ledger, engines):
    """The one that has lent something."""
    [(_, name)] = ledger.loans()
    return next(engine for engine in engines if engine.name == name)


def test_requests_at_a_lender_that_leaves_end_and_the_others_go_on(make_engine, join, ledger):
    prompts = [prompt_of(200), prompt_of(30, seed=5)]
    want = tokens(make_engine(num_blocks=64).generate(prompts[1:], PARAMS))
    home = join(20, chunk_tokens=32)
    lenders = [join(60), join(60)]
    short = home.add_request(prompts[1], PARAMS)
    home.step()
    long = home.add_request(prompts[0], LONG)
    got = {short: [], long: []}
    lost = None
    for step in range(200):
        if step == 8:
            lender_of(ledger, lenders).close()
        if not home.has_work:
            break
        try:
            for output in home.step():
                got[output.request_id].append(output.token_id)
        except LoansLost as error:
            assert lost is None
            lost = error
    assert lost is not None and lost.requests == [long]
    assert str(lost).startswith(
        f"step: requests [{long}] have ended, whose keys and values were at"
    )
    assert lost.instance in str(lost) and lost.cause
    assert len(got[short]) == PARAMS.max_tokens - 1 and got[short] == want[0][1:]
    assert home.allocator.num_free == 20 and home.num_running == 0
    again = home.add_request(prompts[0], PARAMS)
    want_long = tokens(make_engine(num_blocks=64).generate(prompts[:1], PARAMS))
    assert [run(home)[again]] == want_long, "at the other lender"


def test_a_request_at_two_lenders_ends_with_either(join, ledger, settled):
    home, first, second = join(6), join(20), join(19)
    home.add_request(prompt_of(250), LONG)
    for _ in range(3):
        home.step()
    assert len(ledger.loans()) == 2
    second.close()
    with pytest.raises(LoansLost, match=second.name):
        while home.has_work:
            home.step()
    settled()
    assert first.allocator.num_free == 20 and not home.has_work


def test_lost_loans_are_raised_and_leave_an_idle_engine(make_engine, join, ledger):
    home, lender = join(8), join(60)
    stream = home.stream([prompt_of(200), prompt_of(5)], LONG)
    next(stream)
    lender.close()
    with pytest.raises(LoansLost):
        list(stream)
    assert not home.has_work and home.allocator.num_free == 8


def test_expired_lease_ends_the_request(join, ledger):
    """The borrower's thread does not run, as in a process that was stopped for too long."""
    lends = LoanOptions(lease_s=0.5, heartbeat_s=0.1)
    home, lender = (
        join(8, loan_options=LoanOptions(lease_s=100, heartbeat_s=30)),
        join(60, loan_options=lends),
    )
    home.add_request(prompt_of(200), LONG)
    home.step()
    eventually(lambda: ledger.loans() == {})
    with pytest.raises(LoansLost, match="the lease of 0.5 s was not renewed in time"):
        while home.has_work:
            home.step()
    assert lender.allocator.num_free == 60
