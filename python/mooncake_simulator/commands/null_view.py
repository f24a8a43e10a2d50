"""What a command shows while it runs, and whether it needs rich for it."""

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


def make_view(*, quiet: bool) -> NullView:
    """Make the view of a command; a quiet one needs no package.

    Raises:
        ModuleNotFoundError: rich is missing.
    """
    if quiet:
        return NullView()
    from .view import View

    return View()
