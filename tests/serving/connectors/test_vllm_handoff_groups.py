"""Hand-offs of sliding windows and recurrent states, without vLLM: what it calls, by hand.

Tables and chunks are those that vLLM 0.32 has in these places.
"""

import re
from types import SimpleNamespace

import pytest
import torch

from mooncake_serving.connectors.vllm.handoff_scheduler import HandoffScheduler
from mooncake_serving.connectors.vllm.handoff_worker import HandoffWorker
from mooncake_serving.connectors.vllm.steps import GroupForm
from tests.serving.connectors.test_vllm_handoff import (
    BLOCK,
    HEADS,
    NUM_BLOCKS,
    SETTINGS,
    Engine,
    Status,
    empty,
    engines,  # noqa: F401 - a fixture
    output,
    request,
)

WINDOW = 40
KINDS = ("full", "window", "state")
Table = tuple[list[int], ...]


class Hybrid(Engine):
    """An engine with a group of each kind, which computes tokens that can be told apart."""

    def forms(self):
        forms = [GroupForm("full", BLOCK), GroupForm("window", BLOCK, WINDOW)]
        return [*forms, GroupForm("state", BLOCK)], [["full"], ["window"], ["state"]]

    def make_caches(self, worker: HandoffWorker) -> dict:
        shape = (NUM_BLOCKS, HEADS // self.num_ranks, BLOCK, 2)
        caches = {"full": empty(*shape), "window": empty(*shape)}
        pages = empty(NUM_BLOCKS, 24)  # the page of a block is longer than what is in it
        caches["state"] = [pages[:, :6].unflatten(1, (2, 3)), pages[:, 6:11]]
        worker.register_kv_caches(caches)
        return caches

    def compute(self, tables: Table, first: int, stop: int) -> None:
        for rank, caches in enumerate(self.caches):
            for name, table in zip(KINDS, tables[:2], strict=False):
                for token in range(first, stop):
                    row = caches[name][table[token // BLOCK], :, token % BLOCK]
                    row.copy_(values(name, token, rank, len(row)))
            for part in caches["state"]:
                part[tables[2][(stop - 1) // BLOCK]] = stop + rank / 2

    def prefill(self, prompt: list[int], tables: Table, name="p", first=0, **params) -> dict:
        """Serve a prompt as vLLM does: in chunks that end with blocks, windows moving on."""
        one = request(name, prompt, do_remote_decode=True, **params)
        self.scheduler.added(one)
        self.scheduler.allocated(one, tables, 0)
        self.run(one, tables, first)
        stays, answer = self.scheduler.finished(one)
        assert stays
        self.finished.add(name)
        return answer

    def run(self, one: SimpleNamespace, tables: Table, first: int = 0) -> None:
        begin, size = first, one.num_prompt_tokens
        while begin < size:
            stop = size if begin + 48 >= size else begin + 48
            step = {"cached" if begin > first else "new": [(one.request_id, begin, stop - begin)]}
            here = seen_by(tables, begin, stop)
            self.step(
                output(**step, tables={one.request_id: here}),
                lambda here=here, begin=begin, stop=stop: self.compute(here, begin, stop),
            )
            begin = stop

    def holds(self, tables: Table, first: int, num_tokens: int) -> bool:
        """Whether the blocks hold what the token after ``num_tokens`` needs, of tokens from
        ``first`` on, and nothing else is in any block.
        """
        start = max(first, num_tokens - WINDOW + 1)
        for rank, caches in enumerate(self.caches):
            for name, table, begin in zip(KINDS, tables[:2], (first, start), strict=False):
                wanted = empty(*caches[name].shape)
                for token in range(begin // BLOCK * BLOCK, num_tokens):
                    if token >= begin or name == "window":  # the rest of its first block came, too
                        row = wanted[table[token // BLOCK], :, token % BLOCK]
                        row.copy_(values(name, token, rank, len(row)))
                if not caches[name].nan_to_num(-1).equal(wanted.nan_to_num(-1)):
                    return False
            for part in caches["state"]:
                wanted = empty(*part.shape)
                wanted[tables[2][(num_tokens - 1) // BLOCK]] = num_tokens + rank / 2
                if not part.nan_to_num(-1).equal(wanted.nan_to_num(-1)):
                    return False
        return True


def values(name: str, token: int, rank: int, heads: int) -> torch.Tensor:
    of_heads = torch.arange(rank * heads, (rank + 1) * heads)[:, None]
    return token * 100 + of_heads + (0.5 if name == "window" else 0.25) + torch.zeros(heads, 2)


def seen_by(tables: Table, first: int, stop: int) -> Table:
    """What vLLM has in its tables for a step: no block where a window has moved on, and none but
    the last two of a recurrent layer.
    """
    full, window, state = ([*table[: -(-stop // BLOCK)]] for table in tables)
    skipped = max(0, first - WINDOW + 1) // BLOCK
    window[:skipped] = [0] * skipped
    for place in range(len(state) - 1):
        if place != (first - 1) // BLOCK:
            state[place] = 0
    return full, window, state


def tables_of(first_block: int, num_tokens: int) -> Table:
    count = -(-num_tokens // BLOCK)
    return tuple([*range(first_block + i, first_block + i + count)] for i in range(3))


def to_receive(num_tokens: int, first_block: int = 1) -> Table:
    """What vLLM has in its tables for a request of which that many tokens are to come."""
    full, window, state = tables_of(first_block, num_tokens)
    skipped = max(0, num_tokens - WINDOW + 1) // BLOCK
    window[:skipped] = [0] * skipped
    return full, window, [0] * (len(state) - 1) + state[-1:]


@pytest.mark.parametrize("size", [2, 16, 17, 18, 40, 41, 42, 56, 57, 58, 97, 98, 100, 112])
def test_all_but_the_last_token_is_handed_over(engines, size):  # noqa: F811
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    prompt = [*range(size)]
    answer = p.prefill(prompt, tables_of(3, size - 1))
    assert prompt == [*range(size)]
    one = request("d", prompt, **answer)
    assert d.scheduler.matched(one, 0) == size - 1
    there = to_receive(size - 1)
    d.scheduler.allocated(one, there, size - 1)
    assert not d.until("received", "d").failed
    assert d.holds(there, 0, size - 1)
    p.until("sent", "p")


@pytest.mark.parametrize("size, first", [(98, 16), (98, 64), (98, 80), (98, 96), (34, 32)])
def test_blocks_that_the_decode_engine_has_are_not_written(engines, size, first):  # noqa: F811
    """Others of its requests read them, also those within the window."""
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    one = request("d", [*range(size)], **p.prefill([*range(size)], tables_of(3, size - 1)))
    there = to_receive(size - 1)
    assert d.scheduler.matched(one, first) == size - 1 - first
    d.scheduler.allocated(one, there, size - 1 - first)
    assert not d.until("received", "d").failed
    assert d.holds(there, first, size - 1)


def test_prefixes_that_the_prefill_engine_has(engines):  # noqa: F811
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    tables = tables_of(3, 99)
    p.compute(seen_by(tables, 80, 96), 48, 96)
    p.compute((tables[0], [31] * 7, tables[2]), 0, 48)  # all of it, of the first group
    answer = p.prefill([*range(100)], tables, first=96)
    one, there = request("d", [*range(100)], **answer), to_receive(99)
    d.scheduler.allocated(one, there, 99)
    assert not d.until("received", "d").failed
    assert d.holds(there, 0, 99)


def test_the_last_token_is_taken_from_the_request(engines):  # noqa: F811
    p = engines("P", kind=Hybrid)
    prompt = [*range(40)]
    one = request("p", prompt, do_remote_decode=True)
    p.scheduler.added(one)
    p.scheduler.added(one)  # once
    assert one.prompt_token_ids == one._all_token_ids == prompt[:-1]
    assert (len(prompt), one.num_prompt_tokens) == (40, 39)
    assert one.block_hashes == [hash((*prompt[:end],)) for end in (8, 16, 24, 32)]


@pytest.mark.parametrize("num_senders, num_receivers", [(2, 2), (2, 1), (1, 2)])
def test_states_need_as_many_ranks(engines, num_senders, num_receivers):  # noqa: F811
    p = engines("P", num_senders, kind=Hybrid, settings=SETTINGS)
    d = engines("D", num_receivers, kind=Hybrid)
    one = request("d", [*range(60)], **p.prefill([*range(60)], tables_of(3, 59)))
    there = to_receive(59)
    d.scheduler.allocated(one, there, 59)
    failed = d.until("received", "d").failed
    if num_senders == num_receivers:
        assert not failed and d.holds(there, 0, 59)
    else:
        assert failed == {"d"}
        assert all(caches["full"].isnan().all() for caches in d.caches)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"max_tokens": 2}, "max_tokens must be 1 .* got 2"),
        ({"prompt_token_ids": [1]}, "all but the last token of a prompt is handed over"),
        ({"prompt_token_ids": None}, "its prompt is not of tokens"),
        ({"prompt_embeds": "some"}, "its prompt is not of tokens"),
        ({"skip_reading_prefix_cache": True}, "as prompt_logprobs do"),
        (
            {"mm_features": [SimpleNamespace(mm_position=SimpleNamespace(offset=30, length=10))]},
            "its prompt ends with an image",
        ),
    ],
)
def test_requests_that_cannot_be_handed_over(engines, caplog, changes, match):  # noqa: F811
    """The decode engine learns why, and does not wait for it. If nothing of a prompt can be, what
    the prefill engine answers has it computed there.
    """
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    prompt = [*range(40)]
    refused = request("p", prompt, do_remote_decode=True, transfer_id="t")
    vars(refused).update(changes)
    p.scheduler.added(refused)
    assert refused.num_prompt_tokens == 40
    p.step(output())
    where = {"remote_ranks": [p.workers[0].address], "transfer_id": "t"}
    one = request("d", prompt, do_remote_prefill=True, **where)
    d.scheduler.allocated(one, to_receive(39), 39)
    assert d.until("received", "d").failed == {"d"}
    answer = {"do_remote_prefill": False, "do_remote_decode": False}
    if "max_tokens" in changes:
        answer = None
    assert p.scheduler.finished(refused) == (False, answer)
    assert re.search(f"hand-off of d failed: .*{match}", caplog.text)


def test_what_was_received_is_not_handed_on(caplog):
    forms = {1: GroupForm("state", BLOCK)}
    scheduler = HandoffScheduler("D", forms, sends=True, receives=True)
    both = {"do_remote_prefill": True, "do_remote_decode": True, "remote_ranks": ["h:1"]}
    one = request("d", [*range(40)], transfer_id="t", **both)
    scheduler.added(one)
    assert "what was received is not handed on" in caplog.text
    assert scheduler.matched(one, 0) == 39  # it is received


@pytest.mark.parametrize("when", ["while it is computed", "with its token on the way"])
def test_a_preempted_request(engines, when):  # noqa: F811
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    prompt = [*range(100)]
    one = request("p", prompt, do_remote_decode=True, transfer_id="t")
    where = {"remote_ranks": [p.workers[0].address], "transfer_id": "t"}
    other, there = request("d", prompt, do_remote_prefill=True, **where), to_receive(99)
    p.scheduler.added(one)
    tables = tables_of(3, 99)
    here = seen_by(tables, 0, 48)
    p.step(output(new=[("p", 0, 48)], tables={"p": here}), lambda: p.compute(here, 0, 48))
    if when == "with its token on the way":
        p.run(one, tables)

    def reuse() -> None:
        for layer, ids in zip(KINDS, tables[:2], strict=False):
            p.caches[0][layer][ids] = 7.0

    p.step(output(preempted=["p"]), reuse)
    if when == "while it is computed":
        p.run(one, tables_of(16, 99))
    stays, answer = p.scheduler.finished(one)
    p.finished.add("p")
    sent = p.step(output()).sent
    assert stays and (answer is None) == (when != "while it is computed")
    d.scheduler.allocated(other, there, 99)
    failed = d.until("received", "d").failed
    assert failed == (set() if answer else {"d"})
    if answer:
        assert d.holds(there, 0, 99)
    else:
        assert d.caches[0]["full"].isnan().all()
    assert "p" in sent or p.until("sent", "p")


def test_a_table_without_a_block_that_is_needed(engines, caplog):  # noqa: F811
    """vLLM's null block is neither read nor written."""
    p, d = engines("P", kind=Hybrid), engines("D", kind=Hybrid)
    prompt = [*range(100)]
    for name, tables in (("d", to_receive(99)), ("e", to_receive(99))):
        answer = p.prefill(prompt, tables_of(3, 99), name=f"of {name}")
        one = request(name, prompt, **answer)
        if name == "d":
            tables[1][-1] = 0
        d.scheduler.allocated(one, tables, 99)
        assert d.until("received", name).failed == ({"d"} if name == "d" else set())
    assert "must have a block at 3 up to 7, got none at 6" in caplog.text
    assert d.holds(tables, 0, 99)
    one.status = Status.FINISHED_ABORTED
    p.until("sent", "of e")
