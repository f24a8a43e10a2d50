"""A day by a simulated clock: members and claims expire, use counts decay, memory is swept.

The nodes are simulated; the directory, the placement and the hot keys are real. An oracle, which
keeps times instead of lives, predicts what the directory must answer.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from mooncake_kernels.pool import object_keys
from mooncake_serving.store.cluster.hot_keys import HotKeys
from mooncake_serving.store.directory import Claim, Member
from mooncake_serving.store.directory.embedded import EmbeddedDirectory
from mooncake_serving.store.replication.placement import Placement, place

TTL_S, CLAIM_S, ROUND_S, COOLDOWN_S = 10.0, 5.0, 3.0, 300.0
MAX_COPIES, NUM_KEYS = 3, 200
CAPACITY = 60  # objects of a pool
KEYS = object_keys(np.arange(NUM_KEYS), "day")


@dataclass
class Oracle:
    """What a directory is to know: until when each member lives, and what each pool published."""

    pool_of: dict[str, str]
    until: dict[str, float] = field(default_factory=dict)
    published: dict[str, set[int]] = field(default_factory=dict)
    claims: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    lives_since: dict[str, float] = field(default_factory=dict)

    def lives(self, name: str, now: float) -> bool:
        return self.until.get(name, -1.0) > now

    def living_pools(self, now: float) -> set[str]:
        return {self.pool_of[name] for name, until in self.until.items() if until > now}

    def holders(self, index: int, now: float) -> list[str]:
        return sorted(p for p in self.living_pools(now) if index in self.published[p])

    def claim(self, name: str, index: int, now: float) -> Claim:
        if holders := self.holders(index, now):
            return Claim.LISTED if holders == [self.pool_of[name]] else Claim.EXISTS
        claimant, until, life = self.claims.get(index, (name, -1.0, 0.0))
        is_taken = claimant != name and until > now and self.lives(claimant, now)
        if is_taken and life == self.lives_since[claimant]:
            return Claim.TAKEN
        self.claims[index] = (name, now + CLAIM_S, self.lives_since[name])
        return Claim.GRANTED

    def join(self, name: str, now: float) -> None:
        if self.pool_of[name] not in self.living_pools(now):
            self.published[self.pool_of[name]] = set()
        if not self.lives(name, now):
            self.lives_since[name] = now
        self.until[name] = now + TTL_S


@dataclass
class Node:
    """A process: it may be down, or asleep, and its pool is lost with the last process of it."""

    member: Member
    is_up: bool = False
    sleeps_until: float = 0.0
    granted: set[int] = field(default_factory=set)
    hot: HotKeys | None = None


class Day:
    """The cluster, and what happens in it, by a seed."""

    def __init__(self, seed: int):
        self.now = 0.0
        self.random = random.Random(seed)
        self.directory = EmbeddedDirectory(clock=lambda: self.now)
        pools = ["h0/a", "h0/a", "h0/b", "h1/a", "h2/a", "h2/b", "h3/a"]
        self.nodes = [
            Node(Member(f"n{i}", pool[:2], pool, CAPACITY, CAPACITY))
            for i, pool in enumerate(pools)
        ]
        self.oracle = Oracle({node.member.name: node.member.pool for node in self.nodes})
        self.objects: dict[str, dict[int, None]] = {pool: {} for pool in pools}  # in order of age
        self.chosen: dict[tuple[str, int], float] = {}
        self.counts = dict.fromkeys(
            ["died", "forgotten", "granted", "taken", "void_claims", "hot", "repaired"], 0
        )

    def run(self, duration_s: float) -> None:
        while self.now < duration_s:
            self.now += ROUND_S
            for node in self.nodes:
                if not node.is_up:
                    if self.random.random() < 0.02:
                        self.start(node)
                elif self.now >= node.sleeps_until:
                    self.live(node)
            if self.random.random() < 0.3:
                self.look()
            if self.random.random() < 0.05:
                self.sweep()

    def start(self, node: Node) -> None:
        node.is_up, node.granted = True, set()
        node.hot = HotKeys(3, max_copies=MAX_COPIES, cooldown_s=COOLDOWN_S, clock=lambda: self.now)
        self.chosen = {key: t for key, t in self.chosen.items() if key[0] != node.member.name}
        self.join(node)

    def join(self, node: Node) -> None:
        member = node.member
        if member.pool not in self.oracle.living_pools(self.now):
            self.counts["forgotten"] += 1
        self.directory.join(member, TTL_S)
        self.oracle.join(member.name, self.now)
        self.publish(member.pool, list(self.objects[member.pool]))

    def live(self, node: Node) -> None:
        """What a node does in a round; it dies now and then, or sleeps longer than it may."""
        chance = self.random.random()
        if chance < 0.001:
            self.die(node)
            return
        if chance < 0.004:
            node.sleeps_until = self.now + self.random.uniform(0, 3 * TTL_S)
            return
        name, pool = node.member.name, node.member.pool
        node.member = node.member.with_free(CAPACITY - len(self.objects[pool]))
        known = self.directory.renew(node.member, TTL_S)
        assert known == self.oracle.lives(name, self.now)
        if known:
            self.oracle.until[name] = self.now + TTL_S
        else:
            node.granted = set()
            self.join(node)
        if self.random.random() < 0.3:
            self.act(node)

    def act(self, node: Node) -> None:
        self.random.choice([self.claim, self.finish, self.read, self.repair])(node)

    def die(self, node: Node) -> None:
        self.counts["died"] += 1
        node.is_up = False
        pool = node.member.pool
        if self.random.random() < 0.2:
            self.directory.leave(node.member.name)
            self.oracle.until[node.member.name] = -1.0
        others = [other for other in self.nodes if other.is_up and other.member.pool == pool]
        if not others and self.random.random() < 0.5:
            self.objects[pool] = {}

    def claim(self, node: Node) -> None:
        indices = self.random.sample(range(NUM_KEYS), 8)
        answers = self.directory.claim(node.member.name, KEYS[indices], CLAIM_S).tolist()
        for index, answer in zip(indices, answers, strict=True):
            before = self.oracle.claims.get(index)
            assert answer == self.oracle.claim(node.member.name, index, self.now)
            if answer == Claim.GRANTED:
                node.granted.add(index)
                self.counts["granted"] += 1
                others = before is not None and before[0] != node.member.name
                self.counts["void_claims"] += others
            self.counts["taken"] += answer == Claim.TAKEN

    def finish(self, node: Node) -> None:
        """Publish some of what was claimed, and give the others up; evict what is too much."""
        done = {index for index in node.granted if self.random.random() < 0.5}
        self.put(node.member.pool, sorted(done))
        given_up = sorted(node.granted - done)
        self.directory.abandon(node.member.name, KEYS[given_up])
        for index in given_up:
            if self.oracle.claims.get(index, ("",))[0] == node.member.name:
                del self.oracle.claims[index]
        node.granted = set()

    def put(self, pool: str, indices: list[int]) -> None:
        objects = self.objects[pool]
        objects.update(dict.fromkeys(indices))
        self.publish(pool, indices)
        evicted = list(objects)[: max(len(objects) - CAPACITY, 0)]
        for index in evicted:
            del objects[index]
        self.directory.withdraw(pool, KEYS[evicted])
        self.oracle.published[pool].difference_update(evicted)

    def publish(self, pool: str, indices: list[int]) -> None:
        self.directory.publish(pool, KEYS[indices])
        self.oracle.published[pool].update(indices)
        for index in indices:
            self.oracle.claims.pop(index, None)

    def read(self, node: Node) -> None:
        """A few keys are read often; hot ones that few have are copied here, once a cooldown."""
        indices = sorted({min(int(self.random.expovariate(0.1)), NUM_KEYS - 1) for _ in range(8)})
        holders = self.directory.holders(KEYS[indices])
        pool = node.member.pool
        afar = [
            (index, len(holders[i]))
            for i, index in enumerate(indices)
            if holders[i] and pool not in holders[i]
        ]
        if not afar:
            return
        read, copies = (np.array(column) for column in zip(*afar, strict=True))
        for index in read[node.hot.read(KEYS[read], copies)].tolist():
            assert len(self.oracle.holders(index, self.now)) < MAX_COPIES
            last = self.chosen.get((node.member.name, index), -COOLDOWN_S)
            assert self.now - last >= COOLDOWN_S
            self.chosen[node.member.name, index] = self.now
            self.counts["hot"] += 1
            self.put(pool, [index])

    def repair(self, node: Node) -> None:
        """What only one pool has is put into another, on another host if there is one."""
        pool = node.member.pool
        members = self.directory.members()
        alone = [
            i for i in list(self.objects[pool])[:8] if self.oracle.holders(i, self.now) == [pool]
        ]
        for index in alone:
            choices = place(
                members, 1, 1, having=[pool], placement=Placement(num_sampled=2), seed=index
            )
            for choice in choices:
                target = choice.member
                assert target.pool != pool and target.free_bytes >= 1
                hosts = {m.host for m in members if m.pool and m.free_bytes >= 1 and m.pool != pool}
                assert target.host != node.member.host or hosts == {target.host}
                self.put(target.pool, [index])
                self.counts["repaired"] += 1

    def look(self) -> None:
        """The directory knows what the oracle does, and nothing of it too early or too late."""
        now, oracle = self.now, self.oracle
        living = [member.name for member in self.directory.members()]
        assert living == sorted(name for name in oracle.until if oracle.lives(name, now))
        first = self.random.randrange(NUM_KEYS - 8)
        holders = self.directory.holders(KEYS[first : first + 8])
        expected = [oracle.holders(first + i, now) for i in range(8)]
        assert list(map(list, holders)) == expected
        matched = len(self.directory.match_prefix(KEYS[first : first + 8]))
        assert matched == next((i for i in range(8) if not expected[i]), 8)

    def sweep(self) -> None:
        self.directory.sweep()
        for pool, indices in self.oracle.published.items():
            lives = pool in self.oracle.living_pools(self.now)
            assert self.directory.num_objects(pool) == (len(indices) if lives else 0)

    def end(self) -> None:
        """When all are gone, nothing is left of the day in memory."""
        self.now += TTL_S
        self.directory.sweep()
        assert self.directory.members() == []
        assert not self.directory._holders
        assert not self.directory._claims
        assert not self.directory._pools


def test_simulated_day_of_a_cluster(soak):
    day = Day(seed=24)
    day.run((30 if soak else 1) * 86400.0)
    day.end()
    assert all(day.counts.values()), f"something never happened: {day.counts}"
