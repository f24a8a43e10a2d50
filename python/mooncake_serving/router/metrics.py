"""What Prometheus reads of a router."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .router import Router

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

GAUGES = {
    "up": "whether the engine serves",
    "prefills": "prefills sent and not finished",
    "decoding": "requests that it decodes",
    "kv_tokens": "tokens of all requests that it decodes",
    "others_running": "requests of others than this router that it computes, by its metrics",
    "others_waiting": "requests of others that wait there",
    "held_blocks": "blocks that its events have told",
}
COUNTERS = {
    "event_batches": "batches of KV events",
    "event_gaps": "times that KV events were lost, or the engine was restarted",
    "unnamed_blocks": "blocks of KV events that could not be named",
}


class RouterMetrics:
    """Counters that the router writes, and gauges of its instances, in a registry of their own.

    Attributes:
        registry: of all of them.
        requests: that ended, by endpoint and HTTP status; 499: the client left.
        refusals: by reason, and class of requests.
        replaced: attempts that failed before the first byte, by the engine that failed.
        prompt_tokens: of placed requests.
        cached_tokens: those of them that were predicted to be cached.
        ttft: to the first byte of a stream.
        copies: of hot prefixes, that engines have loaded or failed to, by outcome.
        copied_tokens: of those that were loaded.
    """

    def __init__(self, router: "Router"):
        self.registry = CollectorRegistry()
        prefix, registry = "mooncake_router", self.registry
        self.requests = Counter(
            f"{prefix}_requests", "requests that ended; 499: the client left",
            ["endpoint", "status"], registry=registry,
        )  # fmt: skip
        self.refusals = Counter(
            f"{prefix}_refusals", "requests refused by a decision", ["why", "class"],
            registry=registry,
        )  # fmt: skip
        self.replaced = Counter(
            f"{prefix}_failed_attempts", "attempts that an engine failed before the first byte",
            ["instance"], registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            f"{prefix}_prompt_tokens", "tokens of placed prompts", registry=registry
        )
        self.cached_tokens = Counter(
            f"{prefix}_cached_tokens", "those predicted to be cached where they were sent",
            registry=registry,
        )  # fmt: skip
        self.ttft = Histogram(
            f"{prefix}_time_to_first_token_seconds", "from arrival to the first byte of a stream",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.copies = Counter(
            f"{prefix}_copies", "hot prefixes that an engine was to load: made, failed",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.copied_tokens = Counter(
            f"{prefix}_copied_tokens", "tokens of hot prefixes that engines have loaded",
            registry=registry,
        )  # fmt: skip
        registry.register(_Instances(router))

    def registry_is_up(self, is_up: Callable[[], bool]) -> None:
        """Also tell whether the registry of engines answers."""
        gauge = Gauge(
            "mooncake_router_registry_up", "whether the registry of engines answers",
            registry=self.registry,
        )  # fmt: skip
        gauge.set_function(lambda: float(is_up()))

    def text(self) -> bytes:
        """Return all of them as text."""
        return generate_latest(self.registry)


class _Instances(Collector):
    def __init__(self, router: "Router"):
        self._router = router

    def describe(self) -> list[Metric]:
        return []  # collect() is not called before a scrape

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for name, text in GAUGES.items():
            families[name] = GaugeMetricFamily(_full(name), text, labels=["instance"])
        for name, text in COUNTERS.items():
            families[name] = CounterMetricFamily(_full(name), text, labels=["instance"])
        for instance in self._router.instances():
            for name, family in families.items():
                family.add_metric([instance["name"]], float(instance[name]))
        yield from families.values()


def _full(name: str) -> str:
    return f"mooncake_router_instance_{name}"
