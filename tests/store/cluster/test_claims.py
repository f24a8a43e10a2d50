"""Blocks of code that others can see are running."""

import gc

from mooncake_serving.store.cluster.claims import Guards


class Cycle:
    """What only the garbage collector frees, with what it guards."""

    def __init__(self, held):
        self.held = held
        self.itself = self


def test_guards_can_be_collected_while_others_are_inspected():
    thresholds = gc.get_threshold()
    try:
        for num_allocations in range(60):  # up to the collection
            guards = Guards()
            kept = [guards.new() for _ in range(30)]
            gc.collect()
            gc.disable()
            Cycle(guards.new())
            gc.set_threshold(gc.get_count()[0] + num_allocations)
            gc.enable()
            assert not guards.any()
            gc.set_threshold(*thresholds)
            with kept[0]:
                assert guards.any()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
