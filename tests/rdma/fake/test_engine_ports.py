"""Ports that go down and come back, and ports that are not there."""

import pytest

from .engines import ALL, engines


@pytest.mark.parametrize("down", [[0], [1, 2, 3]])
def test_a_round_of_the_peers_nics_is_one_failure(world, down):
    """Though all of them were tried, if it is not our own port that is down."""
    for index in down:
        world.set_port(index, state="DOWN")
    with engines(near=ALL[:1], far=ALL[1:], transports=["rdma", "tcp"]) as pair:
        pair.move("write", [(0, 0, 4096)])
        failures = pair.near.stats()["paths"][pair.peer.name]["fake0"]["num_failures"]
        rounds = 2  # the second after a pause of 1 s
        assert 1 <= failures <= 3 * rounds  # of each of the three rails
