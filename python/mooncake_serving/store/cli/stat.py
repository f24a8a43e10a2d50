"""``stat`` and ``top``: what a pool reports, once or live; from this host or its admin server."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolCounts

from .admin_client import SCHEMES, AdminClient
from .options import add_command, add_token, add_trust, as_seconds, open_pool

if TYPE_CHECKING:  # the commands that need it import it
    from rich.console import Console
    from rich.table import Table

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
    console().print(as_table(sample))


def top(options: argparse.Namespace) -> None:
    from rich.live import Live

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


def console() -> "Console":
    """Standard output; as wide as needed if it is not a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=120)


def as_table(sample: Sample, before: Sample | None = None) -> "Table":
    """Show a sample, and what changed since the previous one, if given."""
    from rich.table import Table

    gauges, counts = sample.gauges, sample.counts
    table = Table(title=sample.pool, show_header=False, title_justify="left")
    share = sample.used_bytes / gauges["capacity_bytes"]
    table.add_row(
        "used", f"{size(sample.used_bytes)} of {size(gauges['capacity_bytes'])}, {share:.1%}"
    )
    table.add_row("objects", f"{gauges['objects']:,.0f} of {gauges['max_objects']:,.0f}")
    table.add_row(
        "being written, doomed",
        f"{gauges['objects_being_written']:,.0f}, {gauges['doomed_objects']:,.0f}",
    )
    table.add_row("pins, processes", f"{gauges['pins']:,.0f}, {gauges['processes']:,.0f}")
    table.add_row(
        "free parts, largest, fragmentation",
        f"{gauges['free_spans']:,.0f}, {size(gauges['largest_free_bytes'])}, "
        f"{gauges['fragmentation']:.2f}",
    )
    table.add_row("hit rate", percent(counts.hit_rate))
    table.add_row("reads, stored", f"{counts.num_reads:,}, {counts.num_stored:,}")
    table.add_row("evicted, removed", f"{counts.num_evicted:,}, {counts.num_removed:,}")
    table.add_row("bytes read, stored", f"{size(counts.read_bytes)}, {size(counts.stored_bytes)}")
    if ssd := sample.ssd:
        table.add_section()
        table.add_row("disk", f"{size(ssd['ssd_live_bytes'])} of {size(ssd['ssd_capacity_bytes'])}")
        table.add_row(
            "objects there, waiting to go there",
            f"{ssd['ssd_objects']:,.0f}, {ssd['ssd_queued']:,.0f}",
        )
        table.add_row(
            "read there, written, dropped",
            f"{ssd['ssd_hits_total']:,.0f}, {ssd['ssd_demoted_total']:,.0f}, "
            f"{ssd['ssd_dropped_total'] + ssd['ssd_not_demoted_total']:,.0f}",
        )
        table.add_row(
            "damaged there, write errors",
            f"{ssd['ssd_damaged_total']:,.0f}, {ssd['ssd_write_errors_total']:,.0f}",
        )
    if before is not None:
        _add_rates(table, sample, before)
    return table


def _add_rates(table: "Table", sample: Sample, before: Sample) -> None:
    seconds = max(sample.time_s - before.time_s, 1e-9)
    since = sample.counts - before.counts
    table.add_section()
    table.add_row("hit rate now", percent(since.hit_rate))
    table.add_row(
        "reads/s, stored/s",
        f"{since.num_reads / seconds:,.0f}, {since.num_stored / seconds:,.0f}",
    )
    table.add_row("evicted/s", f"{since.num_evicted / seconds:,.0f}")
    table.add_row(
        "read, stored a second",
        f"{size(since.read_bytes / seconds)}, {size(since.stored_bytes / seconds)}",
    )


def percent(rate: float | None) -> str:
    return "nothing was read" if rate is None else f"{rate:.1%}"


def size(num_bytes: float) -> str:
    """Format in the largest unit of which there is at least one."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop(0)
    return f"{num_bytes:.4g} {units[0]}"
