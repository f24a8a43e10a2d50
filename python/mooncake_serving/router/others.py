"""What engines do for others than this router, by their own metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_serving.conductor import Cluster

# By vLLM's names, and SGLang's, of which some queues are only of engines that hand over.
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
CAPACITY = ("sglang:max_total_num_tokens",)
CACHE = "vllm:cache_config_info"  # whose labels tell the capacity
NAMES = (*RUNNING, *WAITING, *USAGE, *CAPACITY, CACHE)
LINE = re.compile(rf"({'|'.join(NAMES)})(?:\{{(.*)\}})? ([0-9.eE+-]+)(?: [0-9]+)?", re.ASCII)
LABEL = re.compile(r'(\w+)="([^"]*)"')
COUNT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class EngineLoad:
    """What an engine tells of itself.

    Attributes:
        running: requests that it computes.
        waiting: requests that wait there.
        usage: the share of its cache that these use.
        capacity_tokens: of its cache; 0: it does not tell.
    """

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    capacity_tokens: int = 0


def read_load(text: str) -> EngineLoad | None:
    """Read the page of an engine's metrics; None: it tells nothing of its load.

    Ranks of data parallelism are added up. Of those of other parallelism, which tell the same, one
    counts.
    """
    values: dict[str, dict[tuple[str | None, ...], float]] = {}
    for line in text.split("\n"):  # thousands, of which few are of interest
        found = LINE.fullmatch(line) if line.startswith(NAMES) else None
        if found is None:
            continue
        name, labels, value = found.groups()
        told = dict(LABEL.findall(labels or ""))
        try:
            number = float(value)
        except ValueError:
            continue
        if name == CACHE:
            size, count = told.get("block_size", ""), told.get("num_gpu_blocks", "")
            are_counts = COUNT.fullmatch(size) and COUNT.fullmatch(count)
            number = float(int(size) * int(count)) if are_counts else 0.0
        if not 0 <= number < 2**62:
            continue
        ranks = values.setdefault(name, {})
        rank = (told.get("engine"), told.get("dp_rank"))
        ranks[rank] = max(number, ranks.get(rank, 0.0))

    def total(names: Sequence[str]) -> float:
        return sum(sum(values.get(name, {}).values()) for name in names)

    if not values:
        return None
    shares = [share for name in USAGE for share in values.get(name, {}).values()]
    return EngineLoad(
        running=int(total(RUNNING)),
        waiting=int(total(WAITING)),
        usage=min(1.0, sum(shares) / len(shares)) if shares else 0.0,
        capacity_tokens=int(total((CACHE, *CAPACITY))),
    )


class OthersLoad:
    """Requests that come to ``n`` engines past this router, as far as their metrics tell.

    An engine tells how many requests it has, not whose. Others' are those beyond the most that this
    router has had there since the report before: late metrics invent none. They run, wait, and use
    memory as all requests there do on average. Those that run are added to the counters of
    ``cluster``.

    Attributes:
        running: ``[n]`` int64, others' requests that an engine computes.
        waiting: ``[n]`` int64, others' requests that wait for their prefill.
    """

    def __init__(self, cluster: Cluster):
        self._cluster, n = cluster, cluster.num_instances
        self.running, self.waiting = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._tokens = np.zeros(n, np.int64)
        self._reported_s = np.zeros(n)
        self._own, self._most_own = np.zeros(n, np.int64), np.zeros(n, np.int64)

    def moved(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Record that requests of this router have left some engines, and are on others.

        An engine is named once for each of them: one call for ``n`` samples is ``n`` requests.
        """
        for number in before:
            self._own[number] -= 1
        for number in now:
            self._own[number] += 1
            self._most_own[number] = max(self._most_own[number], self._own[number])

    def reported(
        self, instance: int, load: EngineLoad, now_s: float, *, only_prefills: bool
    ) -> None:
        """Take a report of an engine; where it only prefills, what runs there is a prefill."""
        total = load.running + load.waiting
        others = max(0, total - int(self._most_own[instance]))
        running = 0 if only_prefills or not others else round(others * load.running / total)
        tokens = load.usage * load.capacity_tokens
        held = int(tokens * running / load.running) if running else 0
        self._set(instance, running, held, others - running)
        self._reported_s[instance] = now_s
        self._most_own[instance] = self._own[instance]

    def forget(self, instance: int) -> None:
        """Record that nothing is known of an engine."""
        self._set(instance, 0, 0, 0)

    def wait_s(self, now_s: float, prefill_s: float) -> np.ndarray:
        """Return ``[n]``, how long others' prefills keep each engine, if each takes so long."""
        passed_s = np.maximum(now_s - self._reported_s, 0.0)
        return np.maximum(self.waiting * prefill_s - passed_s, 0.0)

    def are_at(self, instance: int) -> bool:
        """Whether an engine serves others."""
        return bool(self.running[instance] or self.waiting[instance])

    def _set(self, instance: int, running: int, tokens: int, waiting: int) -> None:
        self._cluster.batch_size[instance] += running - self.running[instance]
        self._cluster.kv_tokens[instance] += tokens - self._tokens[instance]
        self.running[instance], self._tokens[instance] = running, tokens
        self.waiting[instance] = waiting
