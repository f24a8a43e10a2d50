"""A directory against dicts, over everything that can be done to it in any order."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store.directory import Claim, Member

from .support import LONG_S, all_of, holders_of, keys, kill, prefix_of

NAMES = st.sampled_from(["a", "b", "c"])
POOLS = st.sampled_from(["p", "q"])
POOLS_OR_NONE = st.sampled_from(["p", "q", ""])
SOME_KEYS = st.lists(st.integers(0, 4), max_size=4)
NUM_KEYS = 5


class DirectoryMachine(RuleBasedStateMachine):
    """What lives, and nothing else: `members`, `objects` by pool, `claims` of member and key."""

    def __init__(self, make_world):
        super().__init__()
        self.world = make_world()
        self.directory = self.world.directory
        self.members, self.objects, self.claims = {}, {}, {}
        self.dead = set()  # pools that may be swept

    def bury(self, name) -> None:
        """A member is no more; its pool is not if nobody else serves it."""
        member = self.members.pop(name)
        self.claims = {key: who for key, who in self.claims.items() if who != name}
        if member.pool and all(other.pool != member.pool for other in self.members.values()):
            del self.objects[member.pool]
            self.dead.add(member.pool)

    @rule(name=NAMES, pool=POOLS_OR_NONE, free=st.integers(0, 2))
    def join(self, name, pool, free):
        member = Member(name, "host", pool, 10, free)
        self.directory.join(member, LONG_S)
        if name in self.members and self.members[name].pool != pool:
            self.bury(name)
        self.members[name] = member
        if pool:
            self.objects.setdefault(pool, set())

    @rule(name=NAMES, pool=POOLS_OR_NONE, free=st.integers(0, 2))
    def renew(self, name, pool, free):
        member = Member(name, "host", pool, 10, free)
        expected = name in self.members and self.members[name].pool == pool
        assert self.directory.renew(member, LONG_S) == expected
        if expected:
            self.members[name] = member

    @rule(name=NAMES)
    def leave(self, name):
        self.directory.leave(name)
        if name in self.members:
            self.bury(name)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def die(self, data):
        name = data.draw(st.sampled_from(sorted(self.members)))
        kill(self.world, self.members[name])
        self.bury(name)

    @rule(name=NAMES, asked=SOME_KEYS)
    def claim(self, name, asked):
        if name not in self.members:
            with pytest.raises(Unavailable):
                self.directory.claim(name, keys(*asked), LONG_S)
            return
        expected = []
        for key in asked:
            if any(key in objects for objects in self.objects.values()):
                expected.append(Claim.EXISTS)
            elif self.claims.get(key, name) != name:
                expected.append(Claim.TAKEN)
            else:
                expected.append(Claim.GRANTED)
                self.claims[key] = name
        assert self.directory.claim(name, keys(*asked), LONG_S).tolist() == expected

    @rule(pool=POOLS, told=SOME_KEYS)
    def publish(self, pool, told):
        assert self.directory.publish(pool, keys(*told)) == (pool in self.objects)
        if pool in self.objects:
            self.objects[pool].update(told)
            self.claims = {key: who for key, who in self.claims.items() if key not in told}

    @rule(pool=POOLS, told=SOME_KEYS)
    def publish_copies(self, pool, told):
        stays = [any(key in objects for objects in self.objects.values()) for key in told]
        assert self.directory.publish_copies(pool, keys(*told)).tolist() == stays
        if pool in self.objects:
            self.objects[pool].update(itertools.compress(told, stays))

    @rule(pool=POOLS, told=SOME_KEYS)
    def withdraw(self, pool, told):
        self.directory.withdraw(pool, keys(*told))
        self.objects.get(pool, set()).difference_update(told)

    @rule(told=SOME_KEYS)
    def withdraw_all(self, told):
        had = self.directory.withdraw_all(keys(*told))
        assert list(map(list, had)) == [
            sorted(pool for pool, objects in self.objects.items() if key in objects) for key in told
        ]
        for objects in self.objects.values():
            objects.difference_update(told)

    @rule(name=NAMES, told=SOME_KEYS)
    def abandon(self, name, told):
        self.directory.abandon(name, keys(*told))
        self.claims = {k: who for k, who in self.claims.items() if who != name or k not in told}

    @rule()
    def sweep(self):
        assert self.directory.sweep() == sorted(self.dead)
        self.dead.clear()

    @invariant()
    def agrees(self):
        everything = range(NUM_KEYS)
        assert self.directory.members() == [self.members[name] for name in sorted(self.members)]
        expected = [
            sorted(pool for pool, objects in self.objects.items() if key in objects)
            for key in everything
        ]
        assert holders_of(self.directory, *everything) == expected
        prefix = expected.index([]) if [] in expected else NUM_KEYS
        assert prefix_of(self.directory, *everything) == expected[:prefix]
        for pool in ("p", "q"):
            objects = self.objects.get(pool, set())
            assert all_of(self.directory, pool, 2) == objects
            assert self.directory.num_objects(pool) == len(objects)

    def teardown(self):
        self.world.close()


def test_a_directory_is_what_its_model_is(make_world, soak):
    run_state_machine_as_test(
        lambda: DirectoryMachine(make_world),
        settings=settings(max_examples=1000 if soak else 25, stateful_step_count=30, deadline=None),
    )
