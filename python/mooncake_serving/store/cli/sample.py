"""What a pool reports, read on this host or from its admin server."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mooncake_kernels.pool import ObjectPool, PoolCounts

from .admin_client import SCHEMES, AdminClient


@dataclass(frozen=True)
class Sample:
    """The state of a pool at one moment.

    Attributes:
        pool: path of the pool, as its host names it.
        time_s: from a clock of which only differences are meaningful.
        gauges: by metric name without its prefix.
        counts: of all processes.
        ssd: the same as ``gauges`` for the disk, if there is one, as reported by its server.
    """

    pool: str
    time_s: float
    gauges: Mapping[str, float]
    counts: PoolCounts
    ssd: Mapping[str, float] = field(default_factory=dict)

    @property
    def used_bytes(self) -> float:
        return self.gauges["capacity_bytes"] - self.gauges["free_bytes"]


class Source:
    """Source of samples: a pool of this host, or an admin server.

    Args:
        where: a path, or the URL of a server.
        token: see ``AdminClient``.
        open_pool: opens the pool at a path.

    Raises:
        OSError, Unavailable, InvalidArgument: as ``ObjectPool.open``; or the server does not
            answer, or its pool.
    """

    def __init__(self, where: str, token: str | None, open_pool: Callable[[str], ObjectPool]):
        self._client = AdminClient(where, token) if where.startswith(SCHEMES) else None
        self._pool = open_pool(where) if self._client is None else None

    def sample(self) -> Sample:
        """Take a sample."""
        from ..metrics import GAUGES  # needs prometheus-client

        if self._pool is None:
            assert self._client is not None
            return _ask(self._client)
        stats = self._pool.stats()
        gauges = {name: float(getattr(stats, field)) for name, (field, _) in GAUGES.items()}
        return Sample(self._pool.path, time.monotonic(), gauges, self._pool.counts())


def _ask(client: AdminClient) -> Sample:
    """Take a sample of a server's metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    from ..metrics import COUNTERS, GAUGES, PREFIX

    text = client.request("/metrics")
    values: dict[str, float] = {}
    pool = ""
    try:
        for family in text_string_to_metric_families(text.decode()):
            for one in family.samples:
                values[one.name.removeprefix(PREFIX)] = one.value
                pool = one.labels.get("pool", pool)
        if values.get("up") == 0:
            raise TimeoutError(f"{client.url} answers that a stopped process holds its pool")
        gauges = {name: values[name] for name in GAUGES}
        counts = {field: int(values[f"{name}_total"]) for name, (field, _) in COUNTERS.items()}
    except KeyError as missing:
        raise client.is_none(f"it has no {missing}") from None
    except ValueError as error:
        raise client.is_none(f"what it answers are no metrics ({error})") from None
    ssd = {name: value for name, value in values.items() if name.startswith("ssd_")}
    return Sample(pool, time.monotonic(), gauges, PoolCounts(**counts), ssd)
