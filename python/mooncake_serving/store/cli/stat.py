"""``stat`` and ``top``: what a pool reports, once or live; from this host or its admin server."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolCounts

from .admin_client import SCHEMES, AdminClient
from .options import add_command, add_token, add_trust, as_seconds, open_pool

WHERE_HELP = "file of the pool, or http://host:port of its admin server"


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    parser = add_command(
        commands, "stat", stat, "Show a pool's numbers.", "stat /dev/shm/kv --json"
    )
    parser.add_argument("where", metavar="PATH|URL", help=WHERE_HELP)
    parser.add_argument("--json", action="store_true", help="one object")
    add_token(parser)
    add_trust(parser)
    parser = add_command(
        commands, "top", top, "Watch a pool: capacity, hit rate, rates, evictions.",
        "top /dev/shm/kv --interval 2",
    )  # fmt: skip
    parser.add_argument("where", metavar="PATH|URL", help=WHERE_HELP)
    parser.add_argument(
        "--interval",
        type=as_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print two looks' difference, and end")
    add_token(parser)
    add_trust(parser)


def stat(options: argparse.Namespace) -> None:
    sample = Source(options.where, options.token, partial(open_pool, options)).sample()
    counts = {**dataclasses.asdict(sample.counts), "hit_rate": sample.counts.hit_rate}
    if options.json:
        numbers = {**sample.gauges, **counts, **sample.ssd}
        json.dump({"pool": sample.pool, **{n: _whole(x) for n, x in numbers.items()}}, sys.stdout)
        sys.stdout.write("\n")
        return
    from .view import as_table, console  # needs rich

    console().print(as_table(sample))


def top(options: argparse.Namespace) -> None:
    from rich.live import Live

    from .view import as_table, console

    source = Source(options.where, options.token, partial(open_pool, options))
    before = source.sample()
    if options.once:
        time.sleep(options.interval)
        console().print(as_table(source.sample(), before))
        return
    if not sys.stdout.isatty():
        raise InvalidArgument("top: standard output must be a terminal, or --once be given")
    with Live(as_table(before), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            now = source.sample()
            live.update(as_table(now, before), refresh=True)
            before = now


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


def _whole(number: Any) -> Any:
    """An integer where it is one: gauges of Prometheus are floats."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
