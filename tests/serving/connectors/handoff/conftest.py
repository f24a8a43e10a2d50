"""A sender and a receiver in this process."""

import pytest

from tests.serving.connectors.handoff.rank import Rank, settings_of


@pytest.fixture
def pair():
    """Makes a sender and a receiver with the same settings."""
    made: list[Rank] = []

    def make(**settings) -> tuple[Rank, Rank]:
        options = {"settings": settings_of(**settings)}
        made.extend([Rank("sender", **options), Rank("receiver", **options)])
        return made[0], made[1]

    yield make
    for rank in reversed(made):
        rank.close()
