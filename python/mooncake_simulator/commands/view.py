"""The terminal output of the commands: a progress bar and tables, or nothing."""

from collections.abc import Mapping
from typing import Any

from ..reproductions import Outcome


class NullView:
    """Show nothing; ``View`` shows all of it."""

    def __enter__(self) -> "NullView":
        return self

    def __exit__(self, *_: object) -> None:
        """End what is shown."""

    def step(self, text: str, total: int, num_parts: int) -> None:
        """Begin a simulation, one of ``total``; ``num_parts`` is its length, 0 if unknown."""

    def advance(self) -> None:
        """Advance by a completed request, or another part."""

    def outcome(self, outcome: Outcome) -> None:
        """Show figures and claims."""

    def summary(self, title: str, figures: Mapping[str, Any]) -> None:
        """Show named figures."""


class View(NullView):
    """A progress bar over the parts of a simulation on stderr, and tables on stdout."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(highlight=False)
        self._steps = 0
        self._progress = Progress(
            TextColumn("{task.description:>28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)
        self._done = 0
        self._draw_every = 1

    def __enter__(self) -> "View":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, text: str, total: int, num_parts: int) -> None:
        """Begin a simulation, one of ``total``; ``num_parts`` is its length, 0 if unknown."""
        self._steps += 1
        self._done = 0
        self._draw_every = max(1, num_parts // 200)  # drawing is more expensive than simulating
        description = f"{text} ({self._steps} of {total})"
        self._progress.reset(self._task, description=description, total=num_parts or None)

    def advance(self) -> None:
        """Advance by a completed request, or another part."""
        self._done += 1
        if self._done % self._draw_every == 0:
            self._progress.update(self._task, completed=self._done)

    def outcome(self, outcome: Outcome) -> None:
        """Show figures and claims."""
        from rich.table import Table

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
        """Show named figures."""
        from rich.table import Table

        self._console.print(title, style="bold")
        table = Table(show_header=False)
        for name, value in figures.items():
            shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
            table.add_row(name, "-" if value is None else shown)
        self._console.print(table)


def make_view(*, quiet: bool) -> NullView:
    """Make the view of a command; a quiet one needs no package.

    Raises:
        ModuleNotFoundError: rich is missing.
    """
    return NullView() if quiet else View()
