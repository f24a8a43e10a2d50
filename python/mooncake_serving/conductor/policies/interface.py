"""The interface of a policy."""

from typing import Protocol

from ..decision import PrefillChoice
from .view import PrefillView


class PrefillPolicy(Protocol):
    """Chooses where a request is prefilled, and what is fetched for it."""

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        ...
