"""Samples as tables for a terminal."""

import sys

from rich.console import Console
from rich.table import Table

from .stat import Sample


def console() -> Console:
    """Standard output; as wide as needed if it is not a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def as_table(sample: Sample, before: Sample | None = None) -> Table:
    """Show a sample, and what changed since the previous one, if given."""
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


def _add_rates(table: Table, sample: Sample, before: Sample) -> None:
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
