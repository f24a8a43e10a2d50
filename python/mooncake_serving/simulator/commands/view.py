"""What the commands show on a terminal: a progress bar, and tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..reproductions import Outcome


class View:
    """A progress bar over requests on stderr, and tables on stdout.

    Args:
        requests_a_run: of one simulation.
        quiet: show neither.
    """

    def __init__(self, requests_a_run: int, *, quiet: bool):
        self._console = Console(quiet=quiet, highlight=False)
        self._requests_a_run = requests_a_run
        self._steps = 0
        self._progress = Progress(
            TextColumn("{task.description:>28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True, quiet=quiet),
            transient=True,
        )
        self._task = self._progress.add_task("", total=requests_a_run)
        self._done = 0

    def __enter__(self) -> "View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, text: str, total: int) -> None:
        """A simulation begins, one of ``total``."""
        self._steps += 1
        self._done = 0
        description = f"{text} ({self._steps} of {total})"
        self._progress.reset(self._task, description=description, total=self._requests_a_run)

    def advance(self) -> None:
        """A request is done with."""
        self._done += 1
        if self._done % 64 == 0:  # to draw is dearer than to simulate
            self._progress.update(self._task, completed=self._done)

    def outcome(self, outcome: Outcome) -> None:
        """Show figures and claims."""
        self._console.print(outcome.title, style="bold")
        table = Table()
        for name in ("", "ours", "published"):
            table.add_column(name, justify="left" if not name else "right")
        for row in outcome.rows:
            published = "" if row.published is None else f"{row.published:.4g} {row.unit}"
            table.add_row(row.what, f"{row.ours:.4g} {row.unit}", published)
        self._console.print(table)
        for claim in outcome.claims:
            mark = "[green]yes[/]" if claim.holds else "[red]no [/]"
            self._console.print(f"  {mark} {claim.what}")
        for remark in outcome.remarks:
            self._console.print(f"  note: {remark}")

    def summary(self, title: str, figures: Mapping[str, Any]) -> None:
        """Show figures by their names."""
        self._console.print(title, style="bold")
        table = Table(show_header=False)
        for name, value in figures.items():
            table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
        self._console.print(table)
