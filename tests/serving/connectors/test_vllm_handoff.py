"""The scheduler's and the worker's part of a hand-off, without vLLM: what it calls, by hand."""

import enum
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors.handoff import HandoffSettings, Source, source_of
from mooncake_serving.connectors.vllm.handoff_scheduler import HandoffScheduler
from mooncake_serving.connectors.vllm.handoff_step import (
    HandoffOptions,
    digest_of,
    parse_handoff,
)
from mooncake_serving.connectors.vllm.handoff_worker import HandoffWorker
from mooncake_serving.connectors.vllm.steps import GroupForm

NUM_BLOCKS, BLOCK, HEADS, DIM = 32, 16, 4, 8
SETTINGS = HandoffSettings(slot_bytes=64 << 10, num_slots=2)
ALL = {0: GroupForm("full", BLOCK)}


class Status(enum.Enum):
    RUNNING = 0
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2


def request(name: str, prompt: list[int], **params) -> SimpleNamespace:
    hashes: list[str] = []

    def update_block_hashes() -> None:
        all_hashes = [hash((*prompt[:end],)) for end in range(8, len(one._all_token_ids) + 1, 8)]
        hashes.extend(all_hashes[len(hashes) :])

    one = SimpleNamespace(
        request_id=name, prompt_token_ids=prompt, prompt_embeds=None, _all_token_ids=[*prompt],
        num_prompt_tokens=len(prompt), block_hashes=hashes, kv_transfer_params=params,
        update_block_hashes=update_block_hashes, skip_reading_prefix_cache=False, max_tokens=1,
        mm_features=[], status=Status.FINISHED_LENGTH_CAPPED,
    )  # fmt: skip
    update_block_hashes()
    return one


def output(new=(), cached=(), preempted=(), tables=None) -> SimpleNamespace:
    """A step of the scheduler: (request, tokens computed before, tokens of the step) each."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[done for _, done, _ in cached],
        ),
        num_scheduled_tokens={name: count for name, _, count in [*new, *cached]},
        preempted_req_ids=set(preempted) or None,
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: (
                tables[name] if isinstance(tables[name], tuple) else (tables[name],)
            )
        ),
    )


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


class Engine:
    """A scheduler and its workers, by default with caches of attention to all tokens."""

    def __init__(
        self, role: str, num_ranks: int = 1, block: int = BLOCK, settings=SETTINGS, both=False
    ):
        self.block, self.num_ranks = block, num_ranks
        roles = {"sends": role == "P" or both, "receives": role == "D" or both}
        forms, layers = self.forms()
        self.scheduler = HandoffScheduler(role, dict(enumerate(forms)), **roles)
        self.workers, self.caches = [], []
        for rank in range(num_ranks):
            worker = HandoffWorker(
                HandoffOptions("127.0.0.1", settings=settings),
                role,
                forms,
                layers,
                num_blocks=NUM_BLOCKS,
                rank=rank,
                num_ranks=num_ranks,
                num_heads=HEADS,
                **roles,
            )
            self.caches.append(self.make_caches(worker))
            self.workers.append(worker)
        self.scheduler.set_ranks([worker.address for worker in self.workers])
        self._counts: dict[tuple[str, str], int] = {}
        self.finished: set[str] = set()

    def forms(self) -> tuple[list[GroupForm], list[list[str]]]:
        """Its groups, and the names of the layers of each."""
        return [GroupForm("full", self.block)], [["a", "b"]]

    def make_caches(self, worker: HandoffWorker):
        caches = empty(2, NUM_BLOCKS, HEADS // self.num_ranks, self.block, 2 * DIM)
        worker.register_kv_caches({"a": caches[0], "b": caches[1]})
        return caches

    def step(self, scheduled: SimpleNamespace, compute=lambda: None) -> SimpleNamespace:
        """A step of the engine; returns what all workers have reported by now."""
        step = pickle.loads(pickle.dumps(self.scheduler.step(scheduled)))
        reported: dict[str, set[str]] = {"sent": set(), "received": set(), "failed": set()}
        finished, self.finished = self.finished, set()
        for worker in self.workers:
            worker.preempted(step)
        compute()
        for worker in self.workers:
            worker.start(step)
            worker.save(step)
            results = worker.results(finished)
            for kind in ("sent", "received"):
                for name in getattr(results, kind):
                    self._counts[kind, name] = self._counts.get((kind, name), 0) + 1
                    assert self._counts[kind, name] <= len(self.workers), "each once"
                    if self._counts[kind, name] == len(self.workers):
                        reported[kind].add(name)
            reported["failed"] |= results.failed
        self.scheduler.output(
            SimpleNamespace(
                finished_sending=reported["sent"], finished_recving=reported["received"]
            )
        )
        return SimpleNamespace(**reported)

    def until(self, kind: str, name: str) -> SimpleNamespace:
        """Steps without a token until a request is reported."""
        end = time.monotonic() + 60
        failed: set[str] = set()
        while time.monotonic() < end:
            reported = self.step(output())
            failed |= reported.failed
            if name in getattr(reported, kind):
                return SimpleNamespace(failed=failed)
            time.sleep(0.005)
        raise AssertionError(f"{name} was not reported")

    def fill(self, ids: list[int]) -> None:
        """Compute these blocks: what they hold depends on head, layer and place in ``ids``."""
        for rank, caches in enumerate(self.caches):
            own = caches.shape[2]
            for place, block in enumerate(ids):
                for head in range(own):
                    caches[0, block, head] = place * 100 + rank * own + head
                    caches[1, block, head] = -(place * 100 + rank * own + head)

    def holds(self, ids: list[int], first: int = 0) -> bool:
        """Whether the blocks hold what ``fill`` writes."""
        return all(
            bool((caches[layer, block, head] == sign * (place * 100 + rank * own + head)).all())
            for rank, caches in enumerate(self.caches)
            for own in [caches.shape[2]]
            for place, block in enumerate(ids, first)
            for head in range(own)
            for layer, sign in ((0, 1), (1, -1))
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def engines():
    made: list[Engine] = []

    def make(*arguments, kind=Engine, **options) -> Engine:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


PROMPT = [*range(40)]


def prefill(engine: Engine, ids: list[int], **params) -> dict:
    """Serve a prompt in two steps; returns the answer's parameters."""
    one = request("p", PROMPT, do_remote_decode=True, **params)
    engine.scheduler.added(one)
    assert engine.scheduler.matched(one, 0) == 0
    engine.scheduler.allocated(one, (ids[:2],), 0)
    engine.step(output(new=[("p", 0, 32)], tables={"p": ids[:2]}), lambda: engine.fill(ids[:2]))
    engine.step(output(cached=[("p", 32, 8)], tables={"p": ids}), lambda: engine.fill(ids))
    stays, answer = engine.scheduler.finished(one)
    assert stays
    engine.finished.add("p")
    return answer


@pytest.mark.parametrize("num_senders, num_receivers", [(1, 1), (1, 2), (2, 1), (2, 4)])
def test_prefill_first(engines, num_senders, num_receivers):
    p, d = engines("P", num_senders), engines("D", num_receivers)
    answer = prefill(p, [3, 1, 2])
    one = request("d", PROMPT, **answer)
    assert d.scheduler.matched(one, 16) == 23  # but the last one
    assert d.scheduler.matched(one, 16) == 23  # without an effect
    d.scheduler.allocated(one, ([7, 8, 9],), 23)
    assert not d.until("received", "d").failed
    assert all(caches[:, 7].isnan().all() for caches in d.caches)  # it had that block
    assert d.holds([8, 9], first=1)
    p.until("sent", "p")
    assert d.scheduler.matched(one, 0) == 0  # once: after a preemption it is computed
    assert d.scheduler.finished(one) == (False, None)


@pytest.mark.parametrize("by", ["host and port", "bootstrap address"])
def test_both_at_once(engines, by):
    p, d = engines("P", 2), engines("D", 1)
    host, port = p.workers[0].address.rsplit(":", 1)
    where = {
        "host and port": {"remote_host": host, "remote_port": int(port)},
        "bootstrap address": {"remote_bootstrap_addr": f"http://{host}:{port}"},
    }[by]
    p.step(output())  # the workers know each other
    one = request("d", PROMPT, do_remote_prefill=True, transfer_id="t", **where)
    d.scheduler.allocated(one, ([7, 8, 9],), d.scheduler.matched(one, 0))
    d.step(output())
    prefill(p, [3, 1, 2], transfer_id="t")
    assert not d.until("received", "d").failed
    assert d.holds([7, 8, 9])
    p.until("sent", "p")


def test_a_prompt_that_is_another_one_fails(engines):
    p, d = engines("P", settings=replace(SETTINGS, lease_s=1.0)), engines("D")
    one = request("d", [7, *PROMPT[1:]], **prefill(p, [3, 1, 2]))
    d.scheduler.allocated(one, ([7, 8, 9],), 39)
    assert d.until("received", "d").failed == {"d"}
    assert d.caches[0].isnan().all()
    p.until("sent", "p")


def test_an_abort_of_the_receiver_ends_both(engines):
    p, d = engines("P"), engines("D")
    host, port = p.workers[0].address.rsplit(":", 1)
    where = {"remote_host": host, "remote_port": int(port), "transfer_id": "t"}
    p.step(output())
    one = request("d", PROMPT, do_remote_prefill=True, **where)
    d.scheduler.allocated(one, ([7, 8, 9],), 39)
    d.step(output())
    one.status = Status.FINISHED_ABORTED
    assert not d.scheduler.has_waiting
    assert d.scheduler.finished(one) == (False, None)  # vLLM keeps the blocks of a waiting one
    assert d.scheduler.has_waiting
    assert d.until("received", "d").failed == {"d"}
    time.sleep(0.3)
    prefill(p, [3, 1, 2], transfer_id="t")
    p.until("sent", "p")


def test_an_abort_of_the_sender_is_the_receivers_failure(engines):
    p, d = engines("P"), engines("D")
    one = request("p", PROMPT, do_remote_decode=True, transfer_id="t")
    p.scheduler.added(one)
    p.scheduler.allocated(one, ([3, 1],), 0)
    p.step(output(new=[("p", 0, 32)], tables={"p": [3, 1]}), lambda: p.fill([3, 1]))
    source = {"remote_ranks": [p.workers[0].address], "transfer_id": "t"}
    other = request("d", PROMPT, do_remote_prefill=True, **source)
    d.scheduler.allocated(other, ([7, 8, 9],), 39)
    d.step(output())
    one.status = Status.FINISHED_ABORTED
    assert p.scheduler.finished(one) == (True, None)
    p.finished.add("p")
    p.until("sent", "p")
    assert d.until("received", "d").failed == {"d"}


@pytest.mark.parametrize("when", ["all is here", "before it has blocks"])
def test_what_no_one_needs_is_released(engines, when):
    p, d = engines("P"), engines("D")
    one = request("d", PROMPT, **prefill(p, [3, 1, 2]))
    if when == "all is here":
        assert d.scheduler.matched(one, 39) == 0
        d.scheduler.allocated(one, ([7, 8, 9],), 0)
    else:
        assert d.scheduler.finished(one) == (False, None)
    d.step(output())
    p.until("sent", "p")


def test_a_preempted_request_is_sent_from_its_new_blocks(engines):
    p, d = engines("P"), engines("D")
    one = request("p", PROMPT, do_remote_decode=True)
    p.scheduler.added(one)
    p.scheduler.allocated(one, ([3, 1],), 0)
    p.step(output(new=[("p", 0, 32)], tables={"p": [3, 1]}), lambda: p.fill([3, 1]))
    p.step(output(preempted=["p"]), lambda: p.caches[0].fill_(7.0))
    p.scheduler.allocated(one, ([5, 6, 4],), 0)
    tables = {"p": [5, 6, 4]}
    p.step(output(cached=[("p", 0, 40)], tables=tables), lambda: p.fill([5, 6, 4]))
    _, answer = p.scheduler.finished(one)
    p.finished.add("p")
    other = request("d", PROMPT, **answer)
    d.scheduler.allocated(other, ([7, 8, 9],), 39)
    assert not d.until("received", "d").failed
    assert d.holds([7, 8, 9])
    p.until("sent", "p")


def test_two_requests_of_one_transfer(engines, caplog):
    p = engines("P")
    for name in ("p", "q"):
        one = request(name, PROMPT, do_remote_decode=True, transfer_id="t")
        p.scheduler.added(one)
    assert "q is not handed over: another request has its transfer_id t" in caplog.text
    assert p.scheduler.finished(one) == (False, None)


def test_one_sample_of_a_prompt_receives_it(engines):
    p, d = engines("P"), engines("D")
    answer = prefill(p, [3, 1, 2])
    one, other = (request(name, PROMPT, **answer) for name in ("0_d", "1_d"))
    d.scheduler.allocated(one, ([7, 8, 9],), d.scheduler.matched(one, 0))
    assert d.scheduler.matched(other, 0) == 0
    d.scheduler.allocated(other, ([4, 5, 6],), 0)
    assert not d.until("received", "0_d").failed
    assert d.holds([7, 8, 9])
    assert d.scheduler.finished(other) == (False, None)
    p.until("sent", "p")


@pytest.mark.parametrize("params", [{}, {"do_remote_prefill": True}, None])
def test_requests_without_another_engine_are_computed(params):
    scheduler = HandoffScheduler("D", ALL, sends=False, receives=True)
    one = request("d", PROMPT)
    one.kv_transfer_params = params
    assert scheduler.matched(one, 0) == 0
    scheduler.allocated(one, ([1],), 0)
    step = scheduler.step(output())
    assert not step.receives and not step.releases
    assert scheduler.finished(one) == (False, None)


@pytest.mark.parametrize("name", ["t" * 513, ["t"], {"t": 1}, "\ud800"])
def test_a_transfer_that_has_no_right_name_is_computed(name, caplog):
    scheduler = HandoffScheduler("D", ALL, sends=True, receives=True)
    one = request("d", PROMPT, do_remote_prefill=True, remote_ranks=["h:1"], transfer_id=name)
    assert scheduler.matched(one, 0) == 0
    scheduler.allocated(one, ([1],), 0)
    other = request("p", PROMPT, do_remote_decode=True, transfer_id=name)
    scheduler.added(other)
    assert "p is not handed over" in caplog.text
    step = scheduler.step(output())
    assert not step.receives and not step.releases and not step.offers
    assert scheduler.finished(one) == scheduler.finished(other) == (False, None)


@pytest.mark.parametrize("when", ["while it is received", "before it has blocks"])
def test_an_abort_of_a_request_that_is_handed_on(engines, when):
    p, d = engines("P"), engines("D", both=True)
    where = {"remote_ranks": [p.workers[0].address], "transfer_id": "t"}
    one = request("d", PROMPT, do_remote_prefill=True, do_remote_decode=True, **where)
    d.scheduler.added(one)
    if when == "while it is received":
        d.scheduler.allocated(one, ([7, 8, 9],), 39)
        d.step(output())
    one.status = Status.FINISHED_ABORTED
    stays, _ = d.scheduler.finished(one)
    d.finished.add("d")
    assert not stays
    if when == "while it is received":
        d.until("received", "d")
    for _ in range(20):
        assert not d.step(output()).sent  # vLLM has freed its blocks
        time.sleep(0.01)
    worker = d.workers[0]
    assert not worker._sender._transfers and not d.scheduler._sending and not worker._request_of


def test_a_request_that_ends_while_a_store_loads_it_is_not_reported_as_sent(engines):
    """vLLM waits for one report of it, that of the load, and frees its blocks with the first."""
    p = engines("P", both=True)
    one = request("p", PROMPT, do_remote_decode=True, transfer_id="t")
    p.scheduler.added(one)
    p.step(output())
    one.status = Status.FINISHED_ABORTED
    assert p.scheduler.finished(one, is_loading=True) == (False, None)
    p.finished.add("p")
    # The proxy tries again at once, by the same name.
    again = request("again", PROMPT, do_remote_decode=True, transfer_id="t")
    p.scheduler.added(again)
    for _ in range(20):
        assert not p.step(output()).sent
        time.sleep(0.01)
    worker = p.workers[0]
    assert {*worker._sender._transfers} == {"t"} and worker._request_of == {"t": "again"}


def test_the_digest_is_of_all_that_blocks_depend_on():
    one = request("a", PROMPT)
    digests = {digest_of(one, 39), digest_of(one, 38)}
    assert digest_of(request("c", PROMPT), 39) in digests
    assert digest_of(request("d", [*PROMPT[:-1], 7]), 39) in digests
    one.lora_request = SimpleNamespace(lora_name="l")
    digests.add(digest_of(one, 39))
    place = SimpleNamespace(offset=1, length=2)
    one.mm_features = [SimpleNamespace(identifier="image", mm_position=place)]
    digests.add(digest_of(one, 39))
    assert len(digests) == 4


@pytest.mark.parametrize(
    "params, expected",
    [
        ({"remote_ranks": ["h:1", "h:2"], "remote_engine_id": "P"}, Source("P", ("h:1", "h:2"))),
        ({"remote_host": "h", "remote_port": 7}, Source("", first_rank="h:7")),
        ({"remote_host": "::1", "remote_port": 7}, Source("", first_rank="[::1]:7")),
        ({"remote_bootstrap_addr": "http://h:7"}, Source("", first_rank="h:7")),
        ({"remote_bootstrap_addr": "h:7"}, Source("", first_rank="h:7")),
        ({"remote_host": None, "remote_port": None}, None),
        ({"remote_ranks": "h:1"}, None),
        ({"remote_ranks": ["h"]}, None),
        ({"remote_ranks": ["h:1", 2]}, None),
        ({"remote_ranks": ["h:1"] * 4097}, None),
        ({"remote_ranks": ["h:1"], "remote_engine_id": "P" * 513}, None),
        ({"remote_host": "h" * 513, "remote_port": 7}, None),
        ({"remote_host": "h", "remote_port": "x"}, None),
        ({"remote_host": "h", "remote_port": 1 << 16}, None),
        ({"remote_host": "h", "remote_port": True}, None),
        ({"remote_host": "", "remote_port": 7}, None),
        ({"remote_host": "\ud800", "remote_port": 7}, None),
        ({"remote_bootstrap_addr": "http://["}, None),
        ({"remote_bootstrap_addr": "[::1"}, None),
        ({"remote_bootstrap_addr": "http://[::1]:7/path"}, Source("", first_rank="[::1]:7")),
        ({"remote_bootstrap_addr": "http://h"}, None),
        ({"remote_bootstrap_addr": ""}, None),
    ],
)
def test_where_the_other_engine_is(params, expected):
    assert source_of(params) == expected


@pytest.mark.parametrize(
    "config, match",
    [
        ({"hosts": 1}, r"must have no others than .*, got \['hosts'\]"),
        ({"port": -1}, "'port' must be a port, or 0, got -1"),
        ({"transports": "tcp"}, "'transports' must be a list of"),
        ({"lease_s": 0}, "lease_s must be positive"),
        ({"require_rdma": 1}, "require_rdma must be a bool, got 1"),
        ([], "must be an object"),
    ],
)
def test_wrong_settings(config, match):
    with pytest.raises(InvalidArgument, match=match):
        parse_handoff(config)


def test_settings():
    options = parse_handoff({"port": 5, "transports": ["rdma"], "require_rdma": True}, "m")
    assert (options.port, options.transports) == (5, ("rdma",))
    assert options.settings == HandoffSettings(require_rdma=True, model="m")
    assert parse_handoff({"model": ""}, "m").settings.model == ""


@pytest.mark.parametrize(
    "caches, kind, match",
    [
        (torch.zeros(NUM_BLOCKS, 2, BLOCK, 8), "full", "must have 4 heads on each of 1 ranks"),
        (torch.zeros(NUM_BLOCKS + 1, 4, BLOCK, 8), "full", "for the engine's 32 blocks"),
        (torch.zeros(2, NUM_BLOCKS, 4, BLOCK, 8), "full", "for the engine's 32 blocks"),
        ([torch.zeros(NUM_BLOCKS + 1, 8)], "state", "for the engine's 32 blocks"),
        (torch.zeros(NUM_BLOCKS, 3, 8).mT, "state", "must be in one piece in each block"),
        ([], "state", "the model must have caches, got none"),
    ],
)
def test_caches_of_another_form_are_refused(caches, kind, match):
    worker = HandoffWorker(
        HandoffOptions(), "P", [GroupForm(kind, BLOCK)], [["a"]], num_blocks=NUM_BLOCKS, rank=0,
        num_ranks=1, num_heads=HEADS, sends=True, receives=False,
    )  # fmt: skip
    with pytest.raises(Unavailable, match=match):
        worker.register_kv_caches({"a": caches})
    worker.close()
