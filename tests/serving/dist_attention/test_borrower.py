"""The borrower: all or nothing, and lenders that fail in every way."""

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch

import mooncake_kernels as mk
from mooncake_serving.dist_attention import Heartbeat, LenderFailed, LoanOptions, Offer
from mooncake_serving.dist_attention.buffers import RequestBuffer
from mooncake_serving.dist_attention.messages import (
    MAX_PARTS,
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
from mooncake_serving.rpc import Refused
from tests.waiting import eventually

SOON = LoanOptions(answer_s=1.0, heartbeat_s=0.1)


@contextmanager
def lender_that(geometry, answer):
    """An instance that answers a request as ``answer(request, address)`` says; None: not at all."""
    is_over = threading.Event()
    heard = []

    def serve(transfer, address):
        while not is_over.is_set():
            for sender, data in transfer.receive_notifications(0.02):
                request = decode(data)
                heard.append(request)
                reply = answer(request, address)
                if reply is not None:
                    notify = reply if isinstance(reply, bytes) else encode(reply)
                    with transfer.open(sender) as peer:
                        transfer.write(peer, [], notify=notify).wait()

    with mk.TransferEngine(transports=["tcp"]) as transfer:
        buffer = RequestBuffer(transfer, geometry, 16, is_in=True)
        thread = threading.Thread(target=serve, args=(transfer, buffer.address))
        thread.start()
        try:
            yield transfer.name, heard
        finally:
            is_over.set()
            thread.join()


def well(request, address):
    """What a lender answers that does nothing."""
    if isinstance(request, Reserve):
        return Reserved(request.number, address, 16, 30_000)
    if isinstance(request, Store | Attend):
        return (Stored if isinstance(request, Store) else Attended)(request.number)
    if isinstance(request, Renew):
        return Renewed(request.number, request.loans)
    return None


def but(kind, reply):
    """Well, except for one kind of request."""
    return lambda request, address: (
        reply(request) if isinstance(request, kind) else well(request, address)
    )


def test_loans_of_two_lenders_are_all_or_nothing(join, ledger):
    home, first, second = join(), join(num_blocks=10), join(num_blocks=8)
    offers = [Offer(first.name, 10), Offer(second.name, 8)]
    loans = home.borrower.reserve(12, offers)
    assert [(loan.lender, loan.num_blocks) for loan in loans] == [
        (first.name, 10),
        (second.name, 2),
    ]
    assert home.borrower.num_borrowed == 12
    assert home.borrower.reserve(9, [*offers, Offer("127.0.0.1:1", 5)]) == []
    assert home.borrower.num_borrowed == 12
    eventually(lambda: second.blocks.num_free == 6)
    home.borrower.free(loans)
    home.borrower.free(loans)
    eventually(lambda: first.blocks.num_free == 10 and second.blocks.num_free == 8)
    eventually(lambda: ledger.loans() == {})


def test_an_interrupted_reservation_keeps_no_loan(join, monkeypatch):
    home, first, second = join(), join(num_blocks=10), join(num_blocks=10)
    wait = home.borrower._calls.wait

    def interrupted(call, kind):
        if call.name == second.name:
            raise KeyboardInterrupt
        return wait(call, kind)

    monkeypatch.setattr(home.borrower._calls, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        home.borrower.reserve(12, [Offer(first.name, 8), Offer(second.name, 8)])
    assert home.borrower.num_borrowed == 0
    eventually(lambda: first.blocks.num_free == second.blocks.num_free == 10)


def test_lenders_that_are_not_there_or_refuse_are_passed_over(join):
    home, other, busy = join(options=SOON), join(), join()
    offers = [Offer(name, 4) for name in ("127.0.0.1:1", "no name", busy.name, other.name)]
    taken = busy.blocks.take(30)
    [loan] = home.borrower.reserve(4, offers)
    assert loan.lender == other.name
    home.borrower.free([loan])
    busy.blocks.give_back(taken)


@pytest.mark.parametrize("reply", [lambda r: None, lambda r: Refused(r.number, "no"), well])
def test_failed_reservation_is_freed(join, reply):
    home = join(options=SOON)
    answer = but(Reserve, reply) if reply is not well else (lambda r, _: Stored(r.number))
    with lender_that(home.geometry, answer) as (name, heard):
        assert home.borrower.reserve(3, [Offer(name, 3)]) == []
        assert home.borrower.num_borrowed == 0
        eventually(lambda: any(isinstance(request, Free) for request in heard))
    [reserve] = [request for request in heard if isinstance(request, Reserve)]
    assert reserve.num_blocks == 3 and Free(reserve.number) in heard


FAILURES = {
    "silent": (lambda r: None, "no answer in 1 s"),
    "refuses": (lambda r: Refused(r.number, "it was not renewed"), "it was not renewed"),
    "another answer": (lambda r: Reserved(r.number, 0, 1, 1), "the answer is Reserved"),
    "another number": (lambda r: Attended(r.number + 1), "no answer in 1 s"),
    "no message": (lambda r: b"abc", "no answer in 1 s"),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("kind", [Store, Attend])
def test_a_lender_that_fails_is_named_and_its_loans_are_lost(join, kind, what):
    home, good = join(options=SOON), join()
    reply, cause = FAILURES[what]
    told = f"{kind.__name__.lower()}: {cause}"
    [safe] = home.borrower.reserve(2, [Offer(good.name, 2)])
    with lender_that(home.geometry, but(kind, reply)) as (name, heard):
        loans = home.borrower.reserve(2, [Offer(name, 2)]) + home.borrower.reserve(
            1, [Offer(name, 1)]
        )
        with pytest.raises(LenderFailed, match=f"^instance {name}: {told}") as raised:
            home.borrower.store(loans[0], [0, 1])
            q = torch.zeros(1, 6, 16)
            call = home.borrower.start_attention(name, 0, q, [Part(loans[0].number, 1, 2)])
            home.borrower.finish_attention(call, 1)
        assert (raised.value.instance, raised.value.cause) == (name, told)
        assert home.borrower.num_borrowed == 2, "of the good one"
        with pytest.raises(LenderFailed, match="it has failed before"):
            home.borrower.store(loans[1], [0])
        eventually(lambda: {Free(loan.number) for loan in loans} <= set(heard))
    assert home.borrower.store(safe, [0, 1]) == 2
    home.borrower.free([safe])


def test_results_of_an_abandoned_call_land_in_memory_of_no_other(join):
    """One of two lenders fails; the other's answer is under way when its loans are freed."""
    home = join(options=SOON)
    failing = lender_that(home.geometry, but(Attend, lambda r: Refused(r.number, "no")))
    slow = lender_that(home.geometry, but(Attend, lambda r: None))
    q = torch.zeros(1, 6, 16)
    with failing as (first, _), slow as (second, _):
        loans = home.borrower.reserve(2, [Offer(first, 1), Offer(second, 1)])
        calls = [
            home.borrower.start_attention(loan.lender, 0, q, [Part(loan.number, 1, 1)])
            for loan in loans
        ]
        results = weakref.ref(home.borrower._lenders[second].results)
        with pytest.raises(LenderFailed, match=f"^instance {first}: attend: no"):
            home.borrower.finish_attention(calls[0], 1)
        home.borrower.end_calls(calls)
        home.borrower.free(loans)
        gc.collect()
        assert home.borrower.num_borrowed == 0 and results() is not None, "for a lease"


def test_more_parts_than_a_message_holds_are_rejected(join):
    home, lender = join(), join()
    [loan] = home.borrower.reserve(1, [Offer(lender.name, 1)])
    parts = [Part(loan.number, 1, 1)] * (MAX_PARTS + 1)
    with pytest.raises(mk.InvalidArgument, match="parts must be at most 1024, got 1025"):
        home.borrower.start_attention(lender.name, 0, torch.zeros(1, 6, 16), parts)
    home.borrower.free([loan])


def test_answer_from_another_instance_is_ignored(join):
    """A third instance that knows the number cannot answer in the lender's place."""
    home = join(options=SOON)
    with mk.TransferEngine(transports=["tcp"]) as third:
        peer = third.open(home.name)

        def silent(request):
            third.write(peer, [], notify=encode(Stored(request.number))).wait()

        with lender_that(home.geometry, but(Store, silent)) as (name, _):
            [loan] = home.borrower.reserve(1, [Offer(name, 1)])
            with pytest.raises(LenderFailed, match="no answer in 1 s"):
                home.borrower.store(loan, [0])


def test_an_address_that_is_not_the_lenders_is_its_failure(join):
    home = join(options=SOON)

    def lying(request, address):
        is_reserve = isinstance(request, Reserve)
        return Reserved(request.number, 4096, 16, 30_000) if is_reserve else well(request, address)

    with lender_that(home.geometry, lying) as (name, _):
        [loan] = home.borrower.reserve(1, [Offer(name, 1)])
        with pytest.raises(LenderFailed, match=f"^instance {name}: "):
            home.borrower.store(loan, [0])


def test_a_lender_that_closes_during_a_wait_fails_it(join):
    home, lender = join(options=LoanOptions(answer_s=20, heartbeat_s=0.1)), join()
    [loan] = home.borrower.reserve(2, [Offer(lender.name, 2)])
    assert home.borrower.store(loan, [0]) == 1
    lender.member.close()
    lender.transfer.close()
    with pytest.raises(LenderFailed, match=f"^instance {lender.name}: "):
        home.borrower.store(loan, [1])
    assert home.borrower.num_borrowed == 0


def test_renewed_loans_stay(join):
    """Several leases pass without any other message."""
    options = LoanOptions(lease_s=0.5, heartbeat_s=0.05)
    home, lender = join(options=options), join(options=options)
    [loan] = home.borrower.reserve(2, [Offer(lender.name, 2)])
    assert not threading.Event().wait(2.0)
    assert home.borrower.store(loan, [0, 1]) == 2
    home.borrower.free([loan])


def join_silent(join):
    """One whose thread renews nothing by itself."""
    home = join()
    home.member._keep = lambda: None
    return home


def test_every_answer_renews_the_lease_on_arrival(join):
    home, lender = join_silent(join), join()
    [loan] = home.borrower.reserve(2, [Offer(lender.name, 2)])
    known = home.borrower._lenders[lender.name]
    reserved_s = known._renewed_s
    home.borrower.renew()
    eventually(lambda: known._renewed_s > reserved_s)
    renewed_s = known._renewed_s
    home.borrower.store(loan, [0, 1])
    stored_s = known._renewed_s
    call = home.borrower.start_attention(
        lender.name, 0, torch.zeros(1, 6, 16), [Part(loan.number, 1, 2)]
    )
    home.borrower.finish_attention(call, 1)
    assert renewed_s < stored_s < call.started_s == known._renewed_s
    home.borrower.free([loan])


def test_unanswered_renewal_does_not_extend_the_lease(join):
    home = join_silent(join)
    with lender_that(home.geometry, but(Renew, lambda r: None)) as (name, heard):
        [loan] = home.borrower.reserve(2, [Offer(name, 2)])
        known = home.borrower._lenders[name]
        reserved_s = known._renewed_s
        home.borrower.renew()
        eventually(lambda: any(isinstance(request, Renew) for request in heard))
        home.borrower.renew()
        assert known._renewed_s == reserved_s
        known.lease_s = 0.0  # it has passed
        with pytest.raises(LenderFailed, match="was not renewed in time"):
            home.borrower.store(loan, [0])
        assert not any(isinstance(request, Store) for request in heard)


def test_a_loan_that_the_lender_has_ended_is_noticed_before_the_next_write(join):
    """As after a stop for longer than a lease, after which renewals are delivered again."""
    home, lender = join(options=SOON), join()
    ended, other = home.borrower.reserve(2, [Offer(lender.name, 2)]) + home.borrower.reserve(
        3, [Offer(lender.name, 3)]
    )
    known = home.borrower._lenders[lender.name]
    lender.lender.loans.free(home.name, ended.number)
    eventually(lambda: not known.is_leased)
    with pytest.raises(LenderFailed, match="was not renewed in time"):
        home.borrower.store(other, [0])
    assert home.borrower.num_borrowed == 0


def test_freed_and_pending_loans_are_not_reported_missing(join):
    """The lender does not have them when it answers a renewal."""
    home = join_silent(join)
    answers = but(Renew, lambda r: Renewed(r.number, tuple(n for n in r.loans if n == kept.number)))
    with lender_that(home.geometry, answers) as (name, heard):
        [kept] = home.borrower.reserve(2, [Offer(name, 2)])
        [freed] = home.borrower.reserve(1, [Offer(name, 1)])
        [asked] = home.borrower.reserve(1, [Offer(name, 1)])
        asked.is_reserved = False
        known = home.borrower._lenders[name]
        reserved_s = known._renewed_s
        with home.borrower._lock:  # the answer is taken after the loan was freed
            del home.borrower._borrowed[freed.number]
        calls = home.borrower._start_renewals(name, known, [kept.number, freed.number])
        eventually(calls[0].future.done)
        eventually(lambda: known._renewed_s > reserved_s)
        home.borrower.renew()
        eventually(lambda: sum(isinstance(request, Renew) for request in heard) == 2)
        assert heard[-1].loans == (kept.number,) and known.is_leased
        home.borrower.free([kept, asked])


def test_giving_up_a_lender_that_is_gone_does_not_connect_to_it(join, monkeypatch):
    home, lender = join(options=SOON), join()
    loans = [home.borrower.reserve(1, [Offer(lender.name, 1)])[0] for _ in range(3)]
    home.borrower._calls.peers.forget(lender.name)  # as when a write fails

    def connect(name, **options):
        raise AssertionError(f"connects to {name}")

    monkeypatch.setattr(home.transfer, "open", connect)
    home.borrower._lose(lender.name)
    assert home.borrower.num_borrowed == 0 and len(loans) == 3


def test_a_ledger_without_instances_lends_nothing(join, ledger):
    home = join()
    assert home.member.reserve(1) == []
    ledger.heartbeat(Heartbeat("127.0.0.1:1", 10, 10))
    assert home.member.reserve(1) == [], "it is not there"
