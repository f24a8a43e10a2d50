"""Requests that no cache holds alone: the tokens are those of one engine with a large cache."""

import time

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.dist_attention import LoanOptions
from mooncake_serving.dist_attention.engine import DistAttentionEngine
from mooncake_serving.dist_attention.engine.attention import DistPagedAttention
from mooncake_serving.engine import Batch, Chunk, OutOfBlocks, PagedKVCache, SamplingParams
from tests.waiting import eventually

from .conftest import BLOCK_SIZE

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def prompt_of(length, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


def tokens(generations):
    return [generation.token_ids for generation in generations]


def run(engine):
    """Step until all is done, waiting for blocks; tokens by request."""
    got = {}
    while engine.has_work:
        try:
            for output in engine.step():
                got.setdefault(output.request_id, []).append(output.token_id)
        except OutOfBlocks:
            time.sleep(0.005)
    return got


@pytest.mark.parametrize("transports", [("local",), ("shm",), ("tcp",)])
@pytest.mark.parametrize(("length", "chunk"), [(300, 32), (129, 7), (120, 200)])
def test_a_long_prompt_gets_the_same_tokens(make_engine, join, settled, transports, length, chunk):
    prompt = prompt_of(length)
    want = tokens(make_engine(num_blocks=64).generate([prompt], PARAMS))
    home = join(8, chunk_tokens=chunk, transports=transports)
    lender = join(60, transports=transports, axes="block layer kv head token dim")
    assert tokens(home.generate([prompt], PARAMS)) == want
    settled()
    assert lender.allocator.num_free == 60 and home.allocator.num_free == 8
    assert tokens(home.generate([prompt], PARAMS)) == want, "and again"


def test_sampled_tokens_are_the_same(make_engine, join):
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=4, ignore_eos=True)
    home, _ = join(8), join(60)
    want = make_engine(num_blocks=64).generate([prompt_of(200)], params)
    assert tokens(home.generate([prompt_of(200)], params)) == tokens(want)


def test_three_lenders_hold_one_prompt(make_engine, join, ledger):
    prompt = prompt_of(320)
    want = tokens(make_engine(num_blocks=64).generate([prompt], PARAMS))
    home = join(6, chunk_tokens=24)
    lenders = [join(n, loan_options=LoanOptions(num_staged_blocks=3)) for n in (15, 14, 13)]
    request_id = home.add_request(prompt, PARAMS)
    home.step()
    assert set(ledger.loans()) == {(home.name, lender.name) for lender in lenders}
    got = run(home)
    assert [got[request_id]] == want


def test_concurrent_requests_of_which_some_borrow(make_engine, join):
    prompts = [prompt_of(n, seed=n) for n in (100, 9, 150, 33, 1, 64, 210)]
    want = tokens(make_engine(num_blocks=200).generate(prompts, PARAMS))
    home = join(16, chunk_tokens=40, min_own_blocks=2)
    join(40)
    join(30)
    assert tokens(home.generate(prompts, PARAMS)) == want


def test_a_lender_serves_requests_of_its_own_meanwhile(make_engine, join):
    prompts = [prompt_of(n, seed=n) for n in (160, 30, 70)]
    want = tokens(make_engine(num_blocks=200).generate(prompts, PARAMS))
    home, lender = join(8, chunk_tokens=16), join(60, chunk_tokens=16)
    long = home.add_request(prompts[0], PARAMS)
    mine = [lender.add_request(prompt, PARAMS) for prompt in prompts[1:]]
    got, theirs = {long: []}, {request_id: [] for request_id in mine}
    while home.has_work or lender.has_work:
        for engine, of_engine in ((home, got), (lender, theirs)):
            for output in engine.step() if engine.has_work else ():
                of_engine[output.request_id].append(output.token_id)
    assert [got[long], *(theirs[request_id] for request_id in mine)] == want


def test_logits_are_those_over_one_cache(tiny, join):
    """The same chunks by hand: all in a large cache, and with the first 12 blocks elsewhere."""
    prompt = prompt_of(150)
    home, lender = join(20), join(60)
    large = join(60)
    [loan] = home.member.borrower.reserve(12, home.member._manager.lenders(home.name, 12)[:1])
    assert loan.lender in (lender.name, large.name)
    own, all_ids = home.allocator.allocate(20), large.allocator.allocate(19)
    worst = 0.0
    start = num_lent = 0
    while start < len(prompt):
        if start == 96:
            while num_lent < 12 * BLOCK_SIZE:
                first = num_lent // BLOCK_SIZE
                moved = home.member.borrower.store(loan, own[first:12])
                num_lent += moved * BLOCK_SIZE
        chunk = prompt[start : start + 24]
        want = tiny.forward(
            Batch.build([Chunk(chunk, start, all_ids)], BLOCK_SIZE), large.cache, all_logits=True
        )
        batch = Batch.build(
            [Chunk(chunk, start, own[num_lent // BLOCK_SIZE :], num_lent)], BLOCK_SIZE
        )
        attention = DistPagedAttention(batch, home.member.borrower, [[loan]])
        got = tiny.forward(batch, home.cache, all_logits=True, attention=attention)
        worst = max(worst, float((got - want).abs().max()))
        start += 24
    assert num_lent == 96 and worst < 1e-4
    home.member.borrower.free([loan])
    home.allocator.free(own)
    large.allocator.free(all_ids)


def test_a_request_that_fits_borrows_nothing(make_engine, join, ledger):
    home, _ = join(20), join(60)
    home.add_request(prompt_of(100), PARAMS)
    home.step()
    assert ledger.loans() == {} and home.num_running == 1


def test_aborting_a_request_frees_its_loans(join, settled, ledger):
    home, lender = join(8), join(60)
    request_id = home.add_request(prompt_of(200), PARAMS)
    home.step()
    assert ledger.loans() == {(home.name, lender.name): 20}
    assert home.abort(request_id) and not home.abort(request_id)
    settled()
    assert lender.allocator.num_free == 60 and home.allocator.num_free == 8


def test_request_waits_for_lendable_memory_and_is_served_later(make_engine, join, ledger):
    prompt = prompt_of(200)
    want = tokens(make_engine(num_blocks=64).generate([prompt], PARAMS))
    home, lender = join(8), join(30)
    theirs = lender.add_request(prompt_of(100), PARAMS)
    lender.step()
    request_id = home.add_request(prompt, PARAMS)
    eventually(lambda: ledger._beats[lender.name][1].num_free < 20)
    message = "the next of 1 requests needs 28 blocks, of which 8 are free here; no instances lend"
    with pytest.raises(OutOfBlocks, match=message):
        home.step()
    assert home.allocator.num_free == 8 and ledger.loans() == {}
    lender.abort(theirs)
    eventually(lambda: ledger.lenders(home.name, 20))
    assert [run(home)[request_id]] == want


def test_a_stale_offer_is_refused_and_the_next_lender_asked(make_engine, join, ledger):
    prompt = prompt_of(200)
    want = tokens(make_engine(num_blocks=64).generate([prompt], PARAMS))
    slow = LoanOptions(lease_s=60, heartbeat_s=20)  # reports at the start, and when it lends
    home, full, other = join(8), join(60, loan_options=slow), join(59)
    full.allocator.allocate(55)
    assert ledger.lenders(home.name, 20)[0].instance == full.name
    request_id = home.add_request(prompt, PARAMS)
    home.step()
    assert ledger.loans() == {(home.name, other.name): 20}
    assert [run(home)[request_id]] == want
    full.allocator.free(range(55)[::-1])


def test_a_refusal_is_reported(join):
    home, lender = join(8, max_batch_tokens=64), join(60, max_batch_tokens=32, chunk_tokens=32)
    home.add_request(prompt_of(200), PARAMS)
    refusal = f"lend the rest now .instance {lender.name}: reserve: geometry must be .* 1 to 32 "
    with pytest.raises(OutOfBlocks, match=refusal):
        home.step()


def test_borrowing_is_retried_after_a_heartbeat(join, ledger):
    quick = LoanOptions(heartbeat_s=0.05)
    home, lender = join(30, loan_options=quick), join(40, loan_options=quick)
    theirs = lender.allocator.allocate(40)
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    home.add_request(prompt_of(9), long)
    home.step()
    home.add_request(prompt_of(300), PARAMS)
    home.step()
    assert (home.num_running, home.num_waiting) == (1, 1), "no one lends"
    lender.allocator.free(theirs)
    eventually(lambda: ledger.lenders(home.name, 30))
    time.sleep(0.1)  # longer than a heartbeat
    home.step()
    assert (home.num_running, home.num_waiting) == (2, 0)


def test_unreachable_manager_lends_nothing_and_running_requests_continue(
    make_engine, join, ledger, monkeypatch
):
    want = tokens(make_engine(num_blocks=64).generate([prompt_of(9)], PARAMS))
    home, _ = join(20), join(60)

    def unreachable(borrower, num_blocks):
        raise ConnectionRefusedError("no manager")

    monkeypatch.setattr(ledger, "lenders", unreachable)
    short = home.add_request(prompt_of(9), PARAMS)
    long = home.add_request(prompt_of(200), PARAMS)
    got = []
    while home.num_running or not got:
        got += [output.token_id for output in home.step() if output.request_id == short]
    assert [got] == want
    with pytest.raises(OutOfBlocks):
        home.step()
    assert home.abort(long)


def test_a_window_of_one_block_still_advances(make_engine, join):
    prompt = prompt_of(100)
    want = tokens(make_engine(num_blocks=64).generate([prompt], PARAMS))
    home, _ = join(1, min_own_blocks=1), join(60)
    assert tokens(home.generate([prompt], PARAMS)) == want


def test_bad_options_are_rejected(join):
    with pytest.raises(
        ValueError, match="DistAttentionEngine: min_own_blocks must be positive, got 0"
    ):
        join(8, min_own_blocks=0)
    with pytest.raises(ValueError, match="min_own_blocks must be at most the 8 blocks of the ca"):
        join(8, min_own_blocks=9)
    # Of a step, each request may be a part of the message to one lender.
    with pytest.raises(
        ValueError, match="DistAttentionEngine: max_requests must be at most 1024, got 1025"
    ):
        join(8, max_requests=1025)
    join(8, max_requests=1024)
    for changes in (
        {"max_lent_blocks": -1},
        {"num_staged_blocks": 0},
        {"answer_s": 0},
        {"heartbeat_s": 15.0},
        {"max_lent_blocks": 1.5},
        {"max_lent_blocks": True},
        {"num_staged_blocks": "16"},
        {"answer_s": float("inf")},
        {"answer_s": True},
        {"lease_s": "30"},
        {"lease_s": 4e6},
        {"heartbeat_s": None},
    ):
        [name] = changes
        with pytest.raises(ValueError, match=f"^LoanOptions: {name} must be "):
            LoanOptions(**changes)


def test_objects_of_other_classes_are_rejected(tiny, ledger):
    cache = PagedKVCache(tiny.config, 8, block_size=BLOCK_SIZE)
    with mk.TransferEngine(transports=("local",)) as transfer:
        for arguments, pool, message in (
            ((tiny, cache, transfer, None), None, "manager must be a Manager, .*, got None"),
            ((tiny, cache, ledger, transfer), None, "transfer must be a TransferEngine, got <"),
            ((tiny, cache, transfer, ledger), 5, "loan_options must be LoanOptions or None, got 5"),
        ):
            with pytest.raises(InvalidArgument, match=f"^DistAttentionEngine: {message}"):
                DistAttentionEngine(*arguments, loan_options=pool)


def test_a_transfer_engine_serves_one_engine(tiny, ledger):
    """Two would take each other's answers."""
    cache = PagedKVCache(tiny.config, 8, block_size=BLOCK_SIZE)
    with mk.TransferEngine(transports=("tcp",)) as transfer:
        for _ in range(2):  # after the first is closed, another may have it
            with DistAttentionEngine(tiny, cache, transfer, ledger) as engine:
                message = (
                    "^DistAttentionEngine: transfer must be of no other DistAttentionEngine, got"
                )
                with pytest.raises(InvalidArgument, match=message):
                    DistAttentionEngine(tiny, cache, transfer, ledger)
                assert len(engine.generate([prompt_of(10)], PARAMS)) == 1


def test_closed_engine_rejects_calls(join):
    home, _ = join(8), join(60)
    home.add_request(prompt_of(10), PARAMS)
    home.close()
    home.close()
    assert not home.has_work
    for op, call in (
        ("add_request", lambda: home.add_request([1, 2], PARAMS)),
        ("step", home.step),
        ("generate", lambda: home.generate([prompt_of(200)], PARAMS)),
    ):
        with pytest.raises(InvalidArgument, match=f"^{op}: the engine {home.name} is closed$"):
            call()
