"""Metrics of transfer engines for Prometheus; needs the package prometheus-client.

::

    from prometheus_client import REGISTRY

    REGISTRY.register(mk.prometheus_collector(engine))

No background work: counters are read when Prometheus scrapes. docs/transfer/metrics.md has the
names of all metrics, and what their labels may cost.
"""

import importlib.util
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import InvalidArgument, Unavailable
from .transfer import TransferEngine

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["TransferCollector", "prometheus_collector"]


class TransferCollector:
    """A Prometheus collector: what ``prometheus_collector`` returns. Thread-safe.

    It does not keep engines alive; one that is gone is no longer reported.
    """

    def __init__(self, by_peer: bool):
        self._by_peer = by_peer
        self._lock = threading.Lock()
        self._engines: list[weakref.ref[TransferEngine]] = []

    def add(self, *engines: TransferEngine) -> None:
        """Report these engines, too.

        Raises:
            InvalidArgument: one is not a ``TransferEngine``, or shares its name with another here.
        """
        with self._lock:
            by_name = {engine.name: engine for engine in self._alive()}
            for engine in engines:
                if not isinstance(engine, TransferEngine):
                    raise InvalidArgument(
                        f"prometheus_collector: engines must be TransferEngines, got {engine!r:.80}"
                    )
                if by_name.setdefault(engine.name, engine) is not engine:
                    raise InvalidArgument(
                        "prometheus_collector: engines must have names of their own, got two "
                        f"called {engine.name}"
                    )
            self._engines = [weakref.ref(engine) for engine in by_name.values()]

    def collect(self) -> Iterator["Metric"]:
        """Return the current metrics; Prometheus calls it at each scrape."""
        from ._metric_families import families  # needs prometheus-client

        yield from families(self._alive(), by_peer=self._by_peer)

    def _alive(self) -> list[TransferEngine]:
        return [engine for ref in self._engines if (engine := ref()) is not None]


def prometheus_collector(*engines: TransferEngine, by_peer: Any = True) -> TransferCollector:
    """Make a collector of engines' metrics, to register in a Prometheus registry.

    A registry takes one collector for all engines of the process: the label ``engine`` tells them
    apart.

    Args:
        engines: whose metrics; ``add`` takes more later.
        by_peer: whether series have the label ``peer``. Without it they are sums over all peers,
            so their number does not grow with the cluster.

    Raises:
        InvalidArgument: an argument is not an engine, or two engines have the same name.
        Unavailable: prometheus-client is not installed.
    """
    if not isinstance(by_peer, bool):
        raise InvalidArgument(f"prometheus_collector: by_peer must be a bool, got {by_peer!r}")
    if importlib.util.find_spec("prometheus_client") is None:
        raise Unavailable(
            "prometheus_collector: prometheus-client is not installed "
            "(pip install 'mooncake-kernels[metrics]')"
        )
    collector = TransferCollector(by_peer)
    collector.add(*engines)
    return collector
