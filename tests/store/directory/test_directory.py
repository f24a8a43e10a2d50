"""What every directory must do."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store import directory as package
from mooncake_serving.store.directory import (
    MAX_KEYS,
    Claim,
    EmbeddedDirectory,
    Member,
    NotAMember,
    Published,
    RedisDirectory,
)

from ...interrupts import CtrlC
from ...threads import in_threads
from .support import (
    LONG_S,
    SOON_S,
    all_of,
    holders_of,
    keys,
    kill,
    names_of,
    numbers,
    prefix_of,
)

A = Member("a", "host 1", "pool 1", 1 << 40, 1 << 39)
A2 = Member("a2", "host 1", "pool 1")
B = Member("b", "host 2", "pool 2")
POOLLESS = Member("c", "host 2")
LISTED, REMOVED, NOT_SERVED = Published


def claims(directory, member: Member, *numbers: int, ttl_s: float = LONG_S) -> list[Claim]:
    answers = directory.claim(member.name, keys(*numbers), ttl_s)
    assert answers.dtype == np.int8 and answers.shape == (len(numbers),)
    return [Claim(answer) for answer in answers]


def join(directory, *members: Member) -> None:
    for member in members:
        directory.join(member, LONG_S)


def test_members_join_renew_and_leave(directory):
    assert directory.members() == []
    join(directory, POOLLESS, B, A)
    assert directory.members() == [A, B, POOLLESS]
    assert directory.renew(A.with_free(7), LONG_S)
    assert directory.members()[0].free_bytes == 7
    draining = Member("b", "host 3", "pool 2", 5, 4, is_draining=True)
    join(directory, draining)
    assert directory.members()[1] == draining
    directory.leave("a")
    directory.leave("a")
    assert directory.members() == [draining, POOLLESS]
    assert not directory.renew(A, LONG_S)
    assert directory.members() == [draining, POOLLESS]


def test_names_may_be_anything(directory):
    odd = Member('é "1 2\0\n%{}', "日本", '0 0 "x\\/\n\0', (1 << 63) - 1)
    join(directory, odd)
    assert directory.members() == [odd]
    assert directory.renew(odd, LONG_S)
    directory.publish(odd.pool, keys(1))
    assert holders_of(directory, 1) == [[odd.pool]]
    assert claims(directory, odd, 2) == [Claim.GRANTED]
    directory.leave(odd.name)
    assert list(directory.sweep()) == [odd.pool]


def test_membership_expires(world, directory):
    join(directory, A, B)
    kill(world, A)
    assert directory.members() == [B]
    assert not directory.renew(A, LONG_S)
    join(directory, A)
    assert directory.members() == [A, B]
    assert directory.renew(A, LONG_S)


def test_objects_are_published_and_withdrawn(directory):
    join(directory, A, B)
    for _ in range(2):
        directory.publish("pool 1", keys(1, 2, 2))
        directory.publish("pool 2", keys(2, 3))
        assert holders_of(directory, 1, 2, 3, 4, 2) == [
            ["pool 1"], ["pool 1", "pool 2"], ["pool 2"], [], ["pool 1", "pool 2"]
        ]  # fmt: skip
        assert [directory.num_objects(pool) for pool in ("pool 1", "pool 2", "x")] == [2, 2, 0]
    for _ in range(2):
        directory.withdraw("pool 1", keys(2, 2, 4))
        assert holders_of(directory, 1, 2, 3) == [["pool 1"], ["pool 2"], ["pool 2"]]
        assert all_of(directory, "pool 1") == {1} and directory.num_objects("pool 1") == 1
    directory.withdraw("pool 2", keys(2))
    assert holders_of(directory, 2) == [[]]


def test_give_up_requires_another_living_copy(world, directory):
    join(directory, A, B)
    directory.publish("pool 1", keys(1, 2, 3, 4))
    directory.publish("pool 2", keys(2, 3, 5))
    for _ in range(2):
        given_up = directory.give_up("pool 1", keys(1, 2, 5, 6, 2), LONG_S)
        assert given_up.dtype == bool and given_up.tolist() == [False, True, True, False, True]
        assert holders_of(directory, 1, 2, 3, 5, 6) == [
            ["pool 1"], ["pool 2"], ["pool 1", "pool 2"], ["pool 2"], []
        ]  # fmt: skip
    assert all_of(directory, "pool 1") == {1, 3, 4}
    assert directory.give_up("pool 2", keys(2, 3), LONG_S).tolist() == [False, True]
    assert directory.give_up("pool 1", keys(3), LONG_S).tolist() == [False]
    assert holders_of(directory, 2, 3) == [["pool 2"], ["pool 1"]]
    assert directory.give_up("nowhere", keys(1, 6), LONG_S).tolist() == [True, False]
    directory.publish("pool 2", keys(4))
    kill(world, B)
    assert directory.give_up("pool 1", keys(4), LONG_S).tolist() == [False]
    assert holders_of(directory, 4) == [["pool 1"]]


def test_removal_covers_pools_that_gave_up_the_object(world, directory):
    """Its pool still has it."""
    other = Member("other", "host")
    join(directory, A, B)
    for pool in ("pool 1", "pool 2"):
        directory.publish(pool, keys(1, 2, 3, 4, 5))
    assert directory.give_up("pool 1", keys(1, 2, 4), LONG_S).all()
    directory.withdraw("pool 1", keys(2))  # it is gone
    directory.publish("pool 1", keys(4))  # it stays
    assert directory.give_up("pool 2", keys(4), LONG_S).all()
    both = ["pool 1", "pool 2"]
    for _ in range(2):
        had = directory.remove(keys(1, 2, 3, 4), LONG_S)
        assert names_of(had) == [both, ["pool 2"], both, both]
    assert published(directory, "pool 1", 1, is_copy=True) == [REMOVED]
    assert published(directory, "pool 2", 1) == [LISTED]  # as put
    assert names_of(directory.remove(keys(1), LONG_S)) == [["pool 2"]]
    assert directory.give_up("pool 1", keys(5), SOON_S).all()
    for _ in range(2):  # which takes longer
        join(directory, other)
        kill(world, other)
    assert names_of(directory.remove(keys(5), LONG_S)) == [["pool 2"]]


def test_last_of_concurrent_give_ups_keeps_the_object(directory):
    members = [Member(f"m{i}", "host", f"pool {i}") for i in range(4)]
    join(directory, *members)
    for member in members:
        directory.publish(member.pool, keys(*range(20)))
    give_up = partial(directory.give_up, keys=keys(*range(20)), ttl_s=LONG_S)
    answers = in_threads(*(partial(give_up, member.pool) for member in members))
    assert (np.sum(answers, axis=0) == len(members) - 1).all()
    assert {len(names) for names in holders_of(directory, *range(20))} == {1}


def test_objects_are_removed_from_all_pools(directory):
    join(directory, A, B)
    directory.publish("pool 1", keys(1, 2, 5))
    directory.publish("pool 2", keys(2, 3))
    assert claims(directory, A, 4) == [Claim.GRANTED]
    had = directory.remove(keys(2, 3, 4, 2), LONG_S)
    both = ["pool 1", "pool 2"]
    assert names_of(had) == [both, ["pool 2"], [], both]
    assert holders_of(directory, 1, 2, 3, 4, 5) == [["pool 1"], [], [], [], ["pool 1"]]
    assert all_of(directory, "pool 1") == {1, 5} and all_of(directory, "pool 2") == set()
    assert claims(directory, B, 4) == [Claim.TAKEN]  # what is being written goes on


def test_objects_of_a_dead_pool_are_removed_from_no_pool(world, directory):
    join(directory, A, B)
    directory.publish("pool 1", keys(1))
    directory.publish("pool 2", keys(1))
    kill(world, A)
    assert directory.remove(keys(1), LONG_S) == [("pool 2",)]
    join(directory, A)
    assert holders_of(directory, 1) == [[]]


def published(directory, pool: str, *numbers: int, is_copy: bool = False) -> list[Published]:
    answers = directory.publish(pool, keys(*numbers), is_copy=is_copy)
    assert answers.dtype == np.int8 and answers.shape == (len(numbers),)
    return [Published(answer) for answer in answers]


def test_publishing_a_copy_of_a_removed_object_is_refused(world, directory):
    join(directory, A, B)
    assert published(directory, "pool 1", 1, 2) == [LISTED, LISTED]
    assert claims(directory, A, 3) == [Claim.GRANTED]
    assert directory.remove(keys(1, 4), LONG_S) == [("pool 1",), ()]
    assert published(directory, "pool 2", 1, 2, 3, 4, 1, is_copy=True) == [
        REMOVED, LISTED, LISTED, REMOVED, REMOVED
    ]  # fmt: skip
    assert holders_of(directory, 1, 2, 3, 4) == [[], ["pool 1", "pool 2"], ["pool 2"], []]
    assert all_of(directory, "pool 2") == {2, 3}
    assert claims(directory, B, 1) == [Claim.GRANTED]  # a claim alone changes nothing
    assert published(directory, "pool 1", 1, is_copy=True) == [REMOVED]
    assert claims(directory, A, 1) == [Claim.TAKEN]
    assert published(directory, "pool 2", 1) == [LISTED]  # it was put again
    assert published(directory, "pool 1", 1, is_copy=True) == [LISTED]
    assert holders_of(directory, 1) == [["pool 1", "pool 2"]]


def test_removal_expires(world, directory):
    join(directory, A)
    directory.remove(keys(1), SOON_S)
    world.wait(
        lambda: published(directory, "pool 1", 1, is_copy=True) == [LISTED], "it is not forgotten"
    )
    directory.publish("pool 1", keys(2))
    assert directory.remove(keys(2), SOON_S) == [("pool 1",)]
    world.wait(lambda: directory.remove(keys(2), SOON_S) == [()], "it is not forgotten")
    directory.sweep()


def test_a_repeated_removal_returns_the_same_pools(world, directory):
    """His first answer may have been lost, before he could ask them."""
    join(directory, A, B)
    directory.publish("pool 1", keys(1))
    for _ in range(2):
        assert directory.remove(keys(1), LONG_S) == [("pool 1",)]
    directory.publish("pool 2", keys(1))
    assert directory.remove(keys(1), LONG_S) == [("pool 2",)]  # of another object
    kill(world, B)
    assert directory.remove(keys(1), LONG_S) == [()]
    join(directory, B)
    assert directory.remove(keys(1), LONG_S) == [()]


def test_publish_reports_whether_the_pool_is_served(world, directory):
    join(directory, A)
    assert published(directory, "pool 1", 1) == [LISTED]
    for is_copy in (False, True):
        assert published(directory, "pool 2", 1, 2, is_copy=is_copy) == [NOT_SERVED] * 2
    kill(world, A)
    assert published(directory, "pool 1", 1) == [NOT_SERVED]


def test_empty_key_lists(directory):
    join(directory, A)
    none = np.empty((0, 2), np.uint64)
    directory.publish("pool 1", none)
    assert directory.publish("pool 1", none, is_copy=True).shape == (0,)
    directory.withdraw("pool 1", none)
    assert directory.give_up("pool 1", none, LONG_S).shape == (0,)
    directory.abandon("a", none)
    assert directory.claim("a", none, 1).shape == (0,)
    assert directory.holders(none) == []
    assert directory.match_prefix(none) == []
    assert directory.remove(none, LONG_S) == []
    assert directory.keys_of("pool 1")[1].shape == (0, 2)


def test_one_of_many_claims_wins(directory):
    """Threads ask for the same objects in orders of their own."""
    members = [Member(f"m{i}", "host") for i in range(8)]
    join(directory, *members)
    wanted = list(range(100))

    def ask(index: int) -> list[int]:
        order = np.random.default_rng(index).permutation(wanted).tolist()
        parts = [order[start : start + 10] for start in range(0, len(order), 10)]
        answers = [answer for part in parts for answer in claims(directory, members[index], *part)]
        assert set(answers) <= {Claim.GRANTED, Claim.TAKEN}
        return [key for key, a in zip(order, answers, strict=True) if a is Claim.GRANTED]

    won = in_threads(*(partial(ask, i) for i in range(len(members))))
    assert sorted(key for part in won for key in part) == wanted


def test_claim_ends_by_publishing_or_abandoning(directory):
    join(directory, A, A2, B, POOLLESS)
    assert claims(directory, A, 1, 2, 3) == [Claim.GRANTED] * 3
    assert claims(directory, A, 1, 2, 3) == [Claim.GRANTED] * 3
    assert directory.sweep() == []
    assert claims(directory, B, 1, 2, 3, 4) == [Claim.TAKEN] * 3 + [Claim.GRANTED]
    directory.publish("pool 1", keys(1))
    for _ in range(2):
        directory.abandon("a", keys(2, 4))  # of which one is not its own
    assert claims(directory, A, 4) == [Claim.TAKEN]
    assert claims(directory, B, 1, 2, 3) == [Claim.EXISTS, Claim.GRANTED, Claim.TAKEN]
    assert claims(directory, A, 1) == claims(directory, A2, 1) == [Claim.LISTED]
    assert claims(directory, POOLLESS, 1) == [Claim.EXISTS]
    directory.publish("pool 2", keys(1))
    assert claims(directory, A, 1) == claims(directory, B, 1) == [Claim.EXISTS]
    directory.withdraw("pool 1", keys(1))
    assert claims(directory, A, 1) == [Claim.EXISTS]
    assert claims(directory, B, 1) == [Claim.LISTED]
    directory.withdraw("pool 2", keys(1))
    assert claims(directory, B, 1) == [Claim.GRANTED]


def test_claim_expires(world, directory):
    join(directory, A, B)
    assert claims(directory, A, 1, 2) == [Claim.GRANTED] * 2
    assert claims(directory, A, 1, ttl_s=SOON_S) == [Claim.GRANTED]
    world.wait(lambda: claims(directory, B, 1) == [Claim.GRANTED], "the claim stays")
    assert claims(directory, A, 1, 2) == [Claim.TAKEN, Claim.GRANTED]


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "leaves"])
def test_claims_of_dead_members_are_void(world, directory, dies):
    join(directory, A, B, POOLLESS)
    assert claims(directory, A, 1) == claims(directory, POOLLESS, 2) == [Claim.GRANTED]
    for member in (A, POOLLESS):
        if dies:
            kill(world, member)
        else:
            directory.leave(member.name)
    with pytest.raises(NotAMember, match="knows no living member 'a'"):
        directory.claim("a", keys(1), LONG_S)
    join(directory, A)  # has come back, and knows nothing of its claim
    assert claims(directory, B, 1, 2) == [Claim.GRANTED] * 2
    assert claims(directory, A, 1) == [Claim.TAKEN]


def test_claim_survives_its_member_rejoining(directory):
    join(directory, A, B)
    assert claims(directory, A, 1) == [Claim.GRANTED]
    join(directory, A)
    assert claims(directory, B, 1) == [Claim.TAKEN]
    join(directory, Member("a", "host 1", "pool 3"))
    assert claims(directory, B, 1) == [Claim.GRANTED]


def test_pool_lives_as_long_as_any_of_its_members(world, directory):
    join(directory, A, A2, B)
    directory.publish("pool 1", keys(1, 2))
    directory.publish("pool 2", keys(2))
    directory.leave("a")
    assert holders_of(directory, 1, 2) == [["pool 1"], ["pool 1", "pool 2"]]
    assert directory.sweep() == []
    kill(world, A2)
    assert holders_of(directory, 1, 2) == [[], ["pool 2"]]
    assert len(directory.match_prefix(keys(2, 1))) == 1
    assert claims(directory, B, 1, 2) == [Claim.GRANTED, Claim.LISTED]
    assert directory.num_objects("pool 1") == 0 and all_of(directory, "pool 1") == set()
    directory.publish("pool 1", keys(5))  # too late
    directory.withdraw("pool 1", keys(2))
    join(directory, A)
    assert holders_of(directory, 1, 2, 5) == [[], ["pool 2"], []]
    directory.publish("pool 1", keys(1))
    assert directory.sweep() == ["pool 1"]  # the one that died
    assert holders_of(directory, 1, 2) == [["pool 1"], ["pool 2"]]
    assert directory.sweep() == []


def test_members_of_a_pool_join_and_leave_in_any_order(world, directory):
    join(directory, A, A2)
    directory.publish("pool 1", keys(1))
    kill(world, A2)
    assert holders_of(directory, 1) == [["pool 1"]]
    join(directory, A2, Member("a", "host 1", "pool 3"))
    assert holders_of(directory, 1) == [["pool 1"]]
    join(directory, A)
    directory.leave(A2.name)
    assert holders_of(directory, 1) == [["pool 1"]]
    join(directory, A2)
    kill(world, A)
    assert holders_of(directory, 1) == [["pool 1"]]
    kill(world, A2)
    assert holders_of(directory, 1) == [[]]
    assert directory.sweep() == ["pool 1", "pool 3"]


def test_member_moves_to_another_pool(directory):
    join(directory, A)
    directory.publish("pool 1", keys(1))
    moved = Member("a", "host 1", "pool 3")
    assert not directory.renew(moved, LONG_S)
    join(directory, moved)
    assert holders_of(directory, 1) == [[]]
    directory.publish("pool 3", keys(1))
    assert holders_of(directory, 1) == [["pool 3"]]
    assert directory.sweep() == ["pool 1"]


def test_concurrent_sweeps(directory):
    join(directory, *(Member(f"m{i}", "host", f"pool {i}") for i in range(6)))
    everything = keys(*range(3000))
    for i in range(6):
        directory.publish(f"pool {i}", everything)
    for i in range(1, 6):
        directory.leave(f"m{i}")
    swept = in_threads(*[directory.sweep] * 4)
    assert sorted(pool for pools in swept for pool in pools) == [f"pool {i}" for i in range(1, 6)]
    assert len(directory.match_prefix(everything)) == 3000
    assert set(directory.holders(everything)) == {("pool 0",)}


def test_keys_of_lists_stable_keys_during_changes(directory):
    join(directory, A)
    stay, go = list(range(0, 4000, 2)), list(range(1, 4000, 2))
    directory.publish("pool 1", keys(*range(4000)))
    found, cursor, turn = set(), 0, 0
    while True:
        cursor, page = directory.keys_of("pool 1", cursor, 50)
        found.update(numbers(page))
        if cursor == 0:
            break
        directory.withdraw("pool 1", keys(*go[turn * 100 : turn * 100 + 100]))
        directory.publish("pool 1", keys(*range(10_000 + turn * 50, 10_000 + turn * 50 + 20)))
        turn += 1
    assert found >= set(stay)
    assert turn > 10


def test_maximum_number_of_keys(directory):
    join(directory, A, B)
    many = keys(*range(MAX_KEYS))
    assert (directory.claim("a", many, LONG_S) == Claim.GRANTED).all()
    assert (directory.claim("b", many, LONG_S) == Claim.TAKEN).all()
    directory.publish("pool 1", many)
    directory.withdraw("pool 1", many[50_000:50_001])
    directory.publish("pool 2", many[60_000:])
    assert names_of(directory.match_prefix(many)) == [["pool 1"]] * 50_000
    directory.withdraw("pool 2", many)
    holders = directory.holders(many)
    assert len(holders) == MAX_KEYS and holders.index(()) == 50_000
    assert holders.count(("pool 1",)) == MAX_KEYS - 1
    assert all_of(directory, "pool 1", 10_000) == set(range(MAX_KEYS)) - {50_000}
    directory.publish("pool 2", many[5_000:5_002])
    assert np.flatnonzero(directory.give_up("pool 1", many, LONG_S)).tolist() == [5_000, 5_001]
    directory.withdraw("pool 1", many)
    assert directory.num_objects("pool 1") == 0
    with pytest.raises(InvalidArgument, match="claim: keys must be at most 65536, got 65537"):
        directory.claim("a", keys(*range(MAX_KEYS + 1)), LONG_S)


def test_match_prefix_equals_a_loop_over_holders(make_world):
    directory = make_world().directory
    join(directory, A, B)

    @settings(max_examples=60, deadline=None)
    @given(
        has=st.tuples(*2 * [st.sets(st.integers(0, 12))]),
        asked=st.lists(st.integers(0, 12), max_size=16),
    )
    def check(has, asked):
        for pool, objects in zip(("pool 1", "pool 2"), has, strict=True):
            directory.withdraw(pool, keys(*range(13)))
            directory.publish(pool, keys(*objects))
        expected = []
        for key in asked:
            pools = [f"pool {i + 1}" for i, objects in enumerate(has) if key in objects]
            if not pools:
                break
            expected.append(pools)
        assert prefix_of(directory, *asked) == expected

    check()


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 80, 81, 336, 337, 4096, 4097])
def test_a_prefix_of_any_length(directory, length):
    """However many are read at once."""
    directory.join(A, LONG_S)
    directory.publish("pool 1", keys(*range(length), 10_000))
    assert prefix_of(directory, *range(length)) == [["pool 1"]] * length
    assert prefix_of(directory, *range(length), 20_000, 10_000) == [["pool 1"]] * length


def test_object_held_by_many_pools(directory):
    """Pools whose numbers are a part of one another's are not one another."""
    pools = [f"pool {i:03}" for i in range(1, 150)]
    for pool in pools:
        directory.join(Member(f"node of {pool}", "host", pool), LONG_S)
        directory.publish(pool, keys(1, 2))
        directory.publish(pool, keys(1))
    assert holders_of(directory, 1, 2) == [pools, pools]
    left = list(pools)
    for pool in pools[::7] + pools[3::7]:
        directory.withdraw(pool, keys(2))
        left.remove(pool)
        assert holders_of(directory, 1, 2) == [pools, left]
    assert names_of(directory.remove(keys(2), LONG_S)) == [left]
    assert holders_of(directory, 1, 2) == [pools, []]


def test_keys_may_be_a_list(directory):
    join(directory, A)
    directory.publish("pool 1", [(1, 2**64 - 1), (0, 0)])
    assert len(directory.match_prefix([(0, 0), (1, 2**64 - 1), (1, 0)])) == 2


WRONG = {
    "join: member must be a Member, got None": lambda d: d.join(None, 1),
    "join: member.name must be a str of 1 to 255 bytes, got ''": lambda d: d.join(
        Member("", "h"), 1
    ),
    "join: member.host must be a str of at most 255 bytes, got 5": lambda d: d.join(
        Member("a", 5), 1
    ),
    "join: member.pool must be": lambda d: d.join(Member("a", "h", "\ud800"), 1),
    "join: member.capacity_bytes must be an integer": lambda d: d.join(
        Member("a", "h", "p", -1), 1
    ),
    "join: member.free_bytes must be an integer from 0 to": lambda d: d.join(
        Member("a", "h", "p", 1, 0.5), 1
    ),
    "join: member.is_draining must be a bool, got 2": lambda d: d.join(
        Member("a", "h", is_draining=2), 1
    ),
    "join: ttl_s must be a number of seconds above 0, up to 1e": lambda d: d.join(A, 0),
    "renew: ttl_s must be a number of seconds": lambda d: d.renew(A, float("nan")),
    "renew: member must be": lambda d: d.renew("a", 1),
    "leave: name must be a str of 1 to 255 bytes, got None": lambda d: d.leave(None),
    "claim: name must be": lambda d: d.claim("", keys(1), 1),
    "claim: ttl_s must be": lambda d: d.claim("a", keys(1), "1"),
    "claim: keys must be .n, 2. integers, got shape": lambda d: d.claim("a", keys(1)[0], 1),
    "publish: pool must be a str of 1 to 255 bytes, got 'xxx": lambda d: d.publish(
        256 * "x", keys(1)
    ),
    "publish: keys must be .n, 2. integers": lambda d: d.publish("p", keys(1).astype(float)),
    "publish: pool must be a str of 1 to 255 bytes, got array": lambda d: d.publish(
        np.zeros(2), keys(1)
    ),
    "EmbeddedDirectory: clock must be a function, got 1": lambda d: EmbeddedDirectory(1),
    "withdraw: keys must be .n, 2. integers, got 5": lambda d: d.withdraw("p", 5),
    "give_up: keys must be .n, 2. integers, got 5": lambda d: d.give_up("p", 5, 1),
    "give_up: ttl_s must be": lambda d: d.give_up("p", keys(1), 0),
    "abandon: name must be": lambda d: d.abandon(7, keys(1)),
    "holders: keys must be .n, 2. integers, got 'ab'": lambda d: d.holders("ab"),
    "match_prefix: keys must be .n, 2. integers": lambda d: d.match_prefix([(1, 2, 3)]),
    "keys_of: pool must be": lambda d: d.keys_of(""),
    "keys_of: cursor must be 0 or what was returned last, an integer, got -1": lambda d: d.keys_of(
        "p", -1
    ),
    "keys_of: count must be an integer from 1 to 65536, got 0": lambda d: d.keys_of("p", 0, 0),
    "num_objects: pool must be": lambda d: d.num_objects(None),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(directory, message):
    join(directory, A)
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        WRONG[message](directory)
    assert directory.members() == [A]


def test_closed_redis_directory_does_not_reconnect(server):
    directory = RedisDirectory(f"unix://{server.folder}/redis.sock", "test-closed")
    directory.join(A, LONG_S)
    directory.close()
    for call in (directory.members, lambda: directory.publisher(A.pool)):
        with pytest.raises(Unavailable, match="the directory must be open, got a closed one"):
            call()


def test_closing_twice(directory):
    with directory as same:
        assert same is directory
    directory.close()


def test_interrupt_at_any_bytecode_leaves_lists_that_can_be_changed():
    folder = str(Path(package.__file__).parent)
    count, has_come = 0, True
    while has_come:
        count += 1
        directory = EmbeddedDirectory()
        directory.join(A, LONG_S)
        directory.publish(A.pool, keys(1, 2, 3))
        try:
            with CtrlC(folder, count) as ctrl_c:
                directory.withdraw(A.pool, keys(1))
                directory.publish(A.pool, keys(4))
        except KeyboardInterrupt:
            pass
        has_come = ctrl_c.has_come
        assert {2, 3} <= all_of(directory, A.pool) <= {1, 2, 3, 4}, count
        directory.withdraw(A.pool, keys(1, 3))
        directory.publish(A.pool, keys(4, 5))
        assert all_of(directory, A.pool) == {2, 4, 5}, count
        assert directory.num_objects(A.pool) == 3, count
    assert count > 100
