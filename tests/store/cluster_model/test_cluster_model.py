"""ClusterStore on both directories against a dict."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import ClusterMachine


def test_cluster_matches_its_model(make_world, soak):
    run_state_machine_as_test(
        lambda: ClusterMachine(make_world),
        settings=settings(
            max_examples=500 if soak else 15,
            stateful_step_count=50 if soak else 20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
