"""The lender: what a borrower may do, and what changes nothing."""

import itertools
import threading

import pytest
import torch

import mooncake_kernels as mk
from mooncake_serving.dist_attention import LoanOptions
from mooncake_serving.dist_attention.buffers import RequestBuffer, ResultBuffer
from mooncake_serving.dist_attention.geometry import BLOCK_AXES
from mooncake_serving.dist_attention.messages import (
    MAGIC,
    Attend,
    Attended,
    Free,
    Part,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Store,
    Stored,
    decode,
    encode,
)
from mooncake_serving.rpc import MAX_REASON, Refused
from tests.waiting import eventually

from .conftest import make_cache


class Borrower:
    """Speaks the protocol by hand, and so can say anything."""

    def __init__(self, lender, num_staged=16):
        self.transfer = mk.TransferEngine(transports=["tcp"])
        self.peer = self.transfer.open(lender.name)
        self.geometry = lender.geometry
        self.requests = RequestBuffer(self.transfer, self.geometry, num_staged, is_in=False)
        self.results = ResultBuffer(self.transfer, self.geometry, is_in=True)
        self.numbers = itertools.count(1)
        self.to = 0

    def send(self, message, data=()):
        notify = message if isinstance(message, bytes) else encode(message)
        self.transfer.write(self.peer, data, notify=notify).wait()

    def ask(self, message, data=()):
        self.send(message, data)
        [(_, answer)] = self.transfer.receive_notifications(30.0)
        answer = decode(answer)
        assert answer.number == message.number
        return answer

    def reserve(self, num_blocks, geometry=None, number=None):
        number = next(self.numbers) if number is None else number
        numbers = geometry or self.geometry.numbers()
        answer = self.ask(Reserve(number, num_blocks, self.results.address, tuple(numbers)))
        if isinstance(answer, Reserved):
            self.to = answer.requests_address
        return answer

    def store(self, loan, first, blocks):
        self.requests.staged[: len(blocks)] = blocks
        data = self.requests.send_staged(len(blocks), self.to)
        return self.ask(Store(next(self.numbers), loan, first, len(blocks)), data)

    def attend(self, layer, q, *parts):
        self.requests.queries[: len(q)] = q
        message = Attend(next(self.numbers), layer, parts)
        return self.ask(message, self.requests.send_queries(len(q), self.to))


@pytest.fixture
def lender(join):
    return join(options=LoanOptions(max_lent_blocks=10, num_staged_blocks=4))


@pytest.fixture
def borrowers(lender):
    """Two of them, the second with a loan of two blocks that have contents."""
    both = [Borrower(lender), Borrower(lender)]
    yield both
    for borrower in both:
        borrower.transfer.close()


def packed(count, seed=5):
    source = make_cache(num_blocks=count, seed=seed)
    return mk.gather_blocks(source.view(), list(range(count)), axes=BLOCK_AXES)


def contents(lender):
    return [tensor.clone() for index in range(2) for tensor in lender.cache.layer(index)]


def queries(num_rows):
    return torch.randn(num_rows, 6, 16, generator=torch.Generator().manual_seed(1))


def test_blocks_are_stored_attended_to_and_freed(lender, borrowers):
    borrower, _ = borrowers
    assert isinstance(borrower.reserve(3), Reserved)
    blocks = packed(3)
    assert isinstance(borrower.store(1, 0, blocks[:2]), Stored)
    assert isinstance(borrower.store(1, 2, blocks[2:]), Stored)
    q = queries(5)
    assert isinstance(borrower.attend(1, q, Part(1, 5, 3)), Attended)
    k, v = (blocks[:, 1, i].transpose(1, 2).contiguous() for i in range(2))
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    rows = mk.mask.rows(mk.mask.full(), mk.ChunkBatch([5], [12]))
    out, lse = mk.paged_attention(q, k, v, table, rows)
    assert torch.equal(borrower.results.out[:5], out) and torch.equal(borrower.results.lse[:5], lse)
    assert lender.lender.loans.lent() == {borrower.transfer.name: 3}
    borrower.send(Free(1))
    eventually(lambda: lender.blocks.num_free == lender.blocks.num_blocks)


@pytest.mark.parametrize("num_blocks", [0, 11, 2**32 - 1])
def test_loans_do_not_exceed_the_cap(lender, borrowers, num_blocks):
    answer = borrowers[0].reserve(num_blocks)
    assert answer == Refused(1, f"num_blocks must be in [1, 10], got {num_blocks}")
    assert isinstance(borrowers[0].reserve(6), Reserved)
    assert borrowers[1].reserve(5).reason == "num_blocks must be in [1, 4], got 5"
    assert isinstance(borrowers[1].reserve(4), Reserved)


@pytest.mark.parametrize("index", range(7))
def test_other_geometry_is_rejected(lender, borrowers, index):
    numbers = list(lender.geometry.numbers())
    numbers[index] += 1
    answer = borrowers[0].reserve(1, geometry=numbers)
    assert isinstance(answer, Refused) and answer.reason.startswith("geometry must be")
    assert lender.lender.loans.num_lent == 0


def test_long_reason_is_truncated(lender, borrowers, monkeypatch):
    def refuse(*_):
        raise MemoryError("é" * 1000)

    monkeypatch.setattr(lender.lender.loans, "reserve", refuse)
    assert borrowers[0].reserve(1) == Refused(1, "é" * MAX_REASON)


def test_loan_number_is_unique_per_borrower(lender, borrowers):
    assert isinstance(borrowers[0].reserve(1, number=7), Reserved)
    assert borrowers[0].reserve(1, number=7) == Refused(7, "loan 7 is there already")
    assert isinstance(borrowers[1].reserve(1, number=7), Reserved), (
        "of another borrower, it is another"
    )


def hostile(theirs):
    """Misuses by a borrower whose loan 1 has one block of two stored; ``theirs`` is another's."""
    return {
        "store: unknown": lambda d: d.store(99, 0, packed(1)),
        "store: another's": lambda d: d.store(theirs, 0, packed(1)),
        "store: over what is there": lambda d: d.store(1, 0, packed(1)),
        "store: a gap": lambda d: d.store(1, 2, packed(1)),
        "store: past the end": lambda d: d.store(1, 1, packed(2)),
        "store: nothing": lambda d: d.ask(Store(50, 1, 1, 0)),
        "store: more than staged": lambda d: d.ask(Store(50, 1, 1, 2**32 - 1)),
        "attend: unknown": lambda d: d.attend(0, queries(1), Part(99, 1, 1)),
        "attend: another's": lambda d: d.attend(0, queries(1), Part(theirs, 1, 2)),
        "attend: what is not stored": lambda d: d.attend(0, queries(1), Part(1, 1, 2)),
        "attend: no blocks": lambda d: d.attend(0, queries(1), Part(1, 1, 0)),
        "attend: no queries": lambda d: d.attend(0, queries(1), Part(1, 0, 1)),
        "attend: no parts": lambda d: d.attend(0, queries(1)),
        "attend: too many queries": lambda d: d.attend(0, queries(1), Part(1, 33, 1)),
        "attend: no such layer": lambda d: d.attend(2, queries(1), Part(1, 1, 1)),
    }


@pytest.mark.parametrize("what", hostile(0))
def test_what_is_not_a_borrowers_is_not_touched(lender, borrowers, what):
    borrower, victim = borrowers
    victim.numbers = itertools.count(500)
    assert isinstance(victim.reserve(2), Reserved)
    assert isinstance(victim.store(500, 0, packed(2)), Stored)
    assert isinstance(borrower.reserve(2), Reserved)
    assert isinstance(borrower.store(1, 0, packed(1)), Stored)
    before, lent = contents(lender), lender.lender.loans.lent()
    borrower.results.out.fill_(7)
    assert isinstance(hostile(500)[what](borrower), Refused)
    assert all(map(torch.equal, contents(lender), before))
    assert lender.lender.loans.lent() == lent and (borrower.results.out == 7).all()
    assert isinstance(victim.attend(0, queries(1), Part(500, 1, 2)), Attended)
    assert isinstance(borrower.store(1, 1, packed(1)), Stored), "its own loan still works"


def test_malformed_messages_are_dropped(lender, borrowers):
    borrower, victim = borrowers
    assert isinstance(victim.reserve(2), Reserved)
    for data in (
        b"",
        b"\x00" * 100,
        encode(Free(1))[:-1],
        encode(Reserved(1, 2, 3, 4)),
        MAGIC,
    ):
        if data:
            borrower.send(data)
    borrower.send(Free(1))  # the victim's number
    assert borrower.ask(Renew(2, (1, 2, 3))) == Renewed(2, ())
    assert isinstance(borrower.reserve(1), Reserved), "it still serves"
    assert lender.lender.loans.lent()[victim.transfer.name] == 2


def test_renewal_returns_the_loans_still_active(lender, borrowers):
    borrower, other = borrowers
    assert isinstance(borrower.reserve(2), Reserved) and isinstance(borrower.reserve(3), Reserved)
    assert isinstance(other.reserve(1, number=7), Reserved)
    assert borrower.ask(Renew(50, (1, 2, 7))) == Renewed(50, (1, 2))
    borrower.send(Free(1))
    assert borrower.ask(Renew(51, (1, 2))) == Renewed(51, (2,))
    assert lender.lender.loans.lent()[borrower.transfer.name] == 3


def test_unrenewed_loans_expire(join):
    options = LoanOptions(lease_s=0.5, heartbeat_s=0.05)
    lender = join(options=options)
    renewing, silent = Borrower(lender), Borrower(lender)
    with renewing.transfer, silent.transfer:
        assert isinstance(renewing.reserve(2), Reserved)
        assert isinstance(silent.reserve(3), Reserved)

        def only_the_silent_ones_ended():
            renewing.send(Renew(9, (1,)))
            return lender.lender.loans.lent() == {renewing.transfer.name: 2}

        eventually(only_the_silent_ones_ended)
        eventually(lambda: lender.blocks.num_free == lender.blocks.num_blocks)


def test_a_borrower_that_cannot_be_answered_loses_its_loans(lender, borrowers):
    borrower, other = borrowers
    assert isinstance(other.reserve(1), Reserved)
    assert isinstance(borrower.reserve(2), Reserved)
    assert isinstance(borrower.store(1, 0, packed(1)), Stored)
    borrower.results.close()  # where the answer would go
    borrower.send(Attend(50, 0, (Part(1, 1, 1),)), borrower.requests.send_queries(1, borrower.to))
    eventually(lambda: lender.lender.loans.lent() == {other.transfer.name: 1})


class Undelivered:
    """The ticket of an answer whose borrower is stopped, until it goes on."""

    def __init__(self):
        self.goes_on = threading.Event()

    def wait(self, timeout_s=10.0):
        if not self.goes_on.wait(timeout_s):
            raise TimeoutError


def test_a_borrower_that_takes_no_answer_holds_up_no_other(lender, borrowers, monkeypatch):
    stopped, other = borrowers
    assert isinstance(stopped.reserve(2), Reserved)
    calls, ticket = lender.lender._calls, Undelivered()
    post = calls.post

    def send_to_none_that_is_stopped(name, message, *args, **options):
        is_one = name == stopped.transfer.name and isinstance(message, Stored)
        return ticket if is_one else post(name, message, *args, **options)

    monkeypatch.setattr(calls, "post", send_to_none_that_is_stopped)
    stopped.send(Store(50, 1, 0, 1), stopped.requests.send_staged(1, stopped.to))
    eventually(lambda: stopped.transfer.name in lender.lender._under_way)
    stopped.send(Attend(51, 0, (Part(1, 1, 1),)), stopped.requests.send_queries(1, stopped.to))
    assert isinstance(other.reserve(2), Reserved)
    assert isinstance(other.store(1, 0, packed(2)), Stored)
    eventually(lambda: lender.lender.has_waiting)
    assert stopped.transfer.receive_notifications(0.0) == []
    ticket.goes_on.set()
    [(_, answer)] = stopped.transfer.receive_notifications(30.0)
    assert decode(answer) == Attended(51)


def test_a_borrower_that_cannot_be_connected_to_holds_up_no_other(lender, borrowers, monkeypatch):
    stopped, other = borrowers
    goes_on, is_asked = threading.Event(), threading.Event()
    peers = lender.lender._peers
    lease = peers.lease

    def connect_to_none_that_is_stopped(name, *args, **options):
        if name == stopped.transfer.name:
            is_asked.set()
            assert goes_on.wait(30.0)
        return lease(name, *args, **options)

    monkeypatch.setattr(peers, "lease", connect_to_none_that_is_stopped)
    stopped.send(Reserve(1, 2, stopped.results.address, lender.geometry.numbers()))
    assert is_asked.wait(30.0)
    assert isinstance(other.reserve(2), Reserved)
    assert lender.lender.loans.lent() == {other.transfer.name: 2}
    goes_on.set()
    [(_, answer)] = stopped.transfer.receive_notifications(30.0)
    assert isinstance(decode(answer), Reserved)


def test_a_restarted_borrower_begins_with_nothing(lender, borrowers):
    borrower, _ = borrowers
    assert isinstance(borrower.reserve(4), Reserved)
    borrower.results = ResultBuffer(borrower.transfer, borrower.geometry, is_in=True)
    assert isinstance(borrower.reserve(3), Reserved)
    assert lender.lender.loans.lent() == {borrower.transfer.name: 3}


def test_borrowing_instance_does_not_lend(join):
    first, second, third = join(), join(), join()
    [loan] = first.member.reserve(32)
    lender = {second.name: second, third.name: third}[loan.lender]
    borrower = Borrower(first)
    with borrower.transfer:
        assert borrower.reserve(1) == Refused(1, "the instance borrows itself")
    assert lender.lender.loans.num_lent == 32
    first.borrower.free([loan])
