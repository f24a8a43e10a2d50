"""A directory against dicts, under every operation in any order."""

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
from mooncake_serving.store.directory import Claim, EmbeddedDirectory, Member, Published

from .support import LONG_S, SOON_S, all_of, holders_of, keys, kill, prefix_of

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
        self.removed = {}  # of a key the pools that had it
        self.leaving = {}  # of a key the pools that are giving it up

    def bury(self, name) -> None:
        """A member is no more; its pool is not if no one else serves it."""
        member = self.members.pop(name)
        self.claims = {key: who for key, who in self.claims.items() if who != name}
        if member.pool and all(other.pool != member.pool for other in self.members.values()):
            del self.objects[member.pool]
            for had in (*self.removed.values(), *self.leaving.values()):
                had.discard(member.pool)
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
            if holders := {pool for pool, objects in self.objects.items() if key in objects}:
                is_own = holders == {self.members[name].pool}
                expected.append(Claim.LISTED if is_own else Claim.EXISTS)
            elif self.claims.get(key, name) != name:
                expected.append(Claim.TAKEN)
            else:
                expected.append(Claim.GRANTED)
                self.claims[key] = name
        assert self.directory.claim(name, keys(*asked), LONG_S).tolist() == expected

    @precondition(lambda self: len(self.members) > 1)
    @rule(data=st.data(), key=st.integers(0, 4))
    def claim_expires(self, data, key):
        name, other = data.draw(st.permutations(sorted(self.members)))[:2]
        is_held = any(key in objects for objects in self.objects.values())
        if is_held or self.claims.get(key, name) != name:
            return
        assert self.directory.claim(name, keys(key), SOON_S).tolist() == [Claim.GRANTED]
        self.world.wait(
            lambda: self.directory.claim(other, keys(key), LONG_S).tolist() == [Claim.GRANTED],
            "the claim stays",
        )
        self.claims[key] = other

    @rule(pool=POOLS, told=SOME_KEYS)
    def publish(self, pool, told):
        self.published(pool, told, told, is_copy=False)

    @rule(pool=POOLS, told=SOME_KEYS)
    def publish_copies(self, pool, told):
        self.published(pool, told, set(told) - self.removed.keys(), is_copy=True)

    def published(self, pool, told, listed, *, is_copy):
        answers = self.directory.publish(pool, keys(*told), is_copy=is_copy).tolist()
        if pool not in self.objects:
            assert answers == [Published.NOT_SERVED] * len(told)
            return
        assert answers == [Published.LISTED if k in listed else Published.REMOVED for k in told]
        self.objects[pool].update(listed)
        self.claims = {key: who for key, who in self.claims.items() if key not in listed}
        self.removed = {key: had for key, had in self.removed.items() if key not in listed}

    @rule(pool=POOLS, told=SOME_KEYS)
    def withdraw(self, pool, told):
        self.directory.withdraw(pool, keys(*told))
        self.objects.get(pool, set()).difference_update(told)
        for key in told:
            self.leaving.get(key, set()).discard(pool)

    @rule(pool=POOLS, told=SOME_KEYS)
    def give_up(self, pool, told):
        others = set().union(*(objects for p, objects in self.objects.items() if p != pool))
        given_up = self.directory.give_up(pool, keys(*told), LONG_S).tolist()
        assert given_up == [key in others for key in told]
        for key in self.objects.get(pool, set()) & others & set(told):
            self.objects[pool].remove(key)
            self.leaving.setdefault(key, set()).add(pool)

    @rule(told=SOME_KEYS)
    def remove(self, told):
        for key in told:
            had = {pool for pool, objects in self.objects.items() if key in objects}
            had |= self.leaving.pop(key, set())
            self.removed[key] = self.removed.get(key, set()) | had
        had = self.directory.remove(keys(*told), LONG_S)
        assert list(map(list, had)) == [sorted(self.removed[key]) for key in told]
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
        for name in self.members:
            self.directory.leave(name)
        self.directory.sweep()
        if isinstance(self.directory, EmbeddedDirectory):
            assert not self.directory._holders and not self.directory._claims
            assert not self.directory._pools, "something is left of dead pools"
        self.world.close()


def test_directory_matches_its_model(make_world, soak):
    run_state_machine_as_test(
        lambda: DirectoryMachine(make_world),
        settings=settings(max_examples=1000 if soak else 25, stateful_step_count=30, deadline=None),
    )
