"""Where copies go: properties of `place` over any members."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store.directory import Member
from mooncake_serving.store.replication.placement import (
    Placement,
    explain,
    free_ratio,
    place,
    refusal,
)

HOSTS = ["h0", "h1", "h2", "h3"]


@st.composite
def clusters(draw) -> list[Member]:
    """Members of a few hosts, of which some share a pool and some have none."""
    members = []
    for i in range(draw(st.integers(0, 8))):
        host = draw(st.sampled_from(HOSTS))
        pool = draw(st.sampled_from(["", f"{host}/0", f"{host}/1"]))
        capacity = draw(st.sampled_from([0, 100, 1000])) if pool else 0
        free = draw(st.integers(0, capacity))
        members.append(Member(f"m{i}", host, pool, capacity, free, draw(st.booleans())))
    return members


@st.composite
def questions(draw) -> dict:
    members = draw(clusters())
    pools = sorted({member.pool for member in members if member.pool})
    wishes = [*HOSTS, *(member.name for member in members), "nobody"]
    return {
        "members": members,
        "num_copies": draw(st.integers(0, 9)),
        "num_bytes": draw(st.sampled_from([0, 1, 50, 500])),
        "having": draw(st.lists(st.sampled_from(pools), unique=True)) if pools else [],
        "placement": Placement(
            preferred=draw(st.lists(st.sampled_from(wishes), unique=True, max_size=3)),
            near=draw(st.sampled_from(["", *HOSTS])),
            num_sampled=draw(st.none() | st.integers(1, 9)),
            may_evict=draw(st.booleans()),
        ),
        "seed": draw(st.integers(0, 5)),
    }


@given(questions())
def test_chosen_members_are_exactly_the_able_ones(question):
    chosen = [choice.member for choice in place(**question)]
    for member in chosen:
        assert member in question["members"]
        assert member.pool and member.pool not in question["having"] and not member.is_draining
        has_room = member.free_bytes >= question["num_bytes"]
        can_make_room = member.capacity_bytes >= question["num_bytes"]
        assert has_room or (question["placement"].may_evict and can_make_room)
    pools = [member.pool for member in chosen]
    assert len(set(pools)) == len(pools)
    able = {
        member.pool
        for member in question["members"]
        if not refusal(member, question["num_bytes"], question["having"], question["placement"])
    }
    assert set(pools) <= able
    assert len(pools) == min(len(able), question["num_copies"])


@given(questions(), st.randoms())
def test_the_order_of_members_does_not_matter(question, random_source):
    shuffled = list(question["members"])
    random_source.shuffle(shuffled)
    assert place(**{**question, "members": shuffled}) == place(**question)


@given(questions())
def test_more_copies_extend_the_choice_for_fewer(question):
    all_copies = place(**{**question, "num_copies": 9})
    assert place(**question) == all_copies[: question["num_copies"]]


@given(questions())
def test_host_gets_a_second_copy_only_as_last_resort(question):
    question["placement"] = Placement(num_sampled=question["placement"].num_sampled)
    having, members = question["having"], question["members"]
    hosts = {member.host for member in members if member.pool in having}
    able = {m.host for m in members if not refusal(m, question["num_bytes"], having)}
    for choice in place(**question):
        if choice.member.host in hosts:
            assert able <= hosts
        hosts.add(choice.member.host)


@given(questions())
def test_room_then_preference_decides_first(question):
    placement, num_bytes = question["placement"], question["num_bytes"]
    order = [
        (choice.member.free_bytes < num_bytes, placement.preference(choice.member))
        for choice in place(**question)
    ]
    assert order == sorted(order)


@given(clusters(), st.integers(0, 5))
def test_emptiest_pool_wins_ties(members, seed):
    alone = [  # each on a host of its own
        Member(m.name, m.name, m.name, m.capacity_bytes, m.free_bytes, m.is_draining)
        for m in members
    ]
    chosen = [choice.member for choice in place(alone, 9, 0, seed=seed)]
    ratios = [free_ratio(member) for member in chosen]
    assert ratios == sorted(ratios, reverse=True)


@given(questions())
def test_every_member_is_explained_once(question):
    lines = explain(**question)
    names = [line.split(":")[0] for line in lines]
    assert sorted(names) == sorted(member.name for member in question["members"])
    chosen = [choice.member.name for choice in place(**question)]
    assert names[: len(chosen)] == chosen
    assert [": not chosen: " in line for line in lines] == (
        [False] * len(chosen) + [True] * (len(lines) - len(chosen))
    )


def pools(*free: int) -> list[Member]:
    return [Member(f"n{i}", f"h{i}", f"p{i}", 100, bytes_) for i, bytes_ in enumerate(free)]


def names(*args, **options) -> list[str]:
    return [choice.member.name for choice in place(*args, **options)]


def test_near_host_is_chosen_until_it_has_a_copy():
    members = [*pools(90, 50, 10), Member("n3", "h2", "p3", 100, 100)]
    assert names(members, 2, 1, placement=Placement(near="h2")) == ["n3", "n0"]
    assert names(members, 1, 1, placement=Placement(near="h2"), having=["p2"]) == ["n0"]


def test_preferred_host_is_chosen_even_with_a_copy():
    members = [*pools(90, 50, 10), Member("n3", "h2", "p3", 100, 100)]
    wish = Placement(preferred=["h2"])
    assert names(members, 1, 1, placement=wish, having=["p2"]) == ["n3"]


def test_non_draining_member_of_a_pool_is_chosen():
    leaving = Member("a", "h", "p", 100, 100, is_draining=True)
    staying = Member("b", "h", "p", 100, 100)
    assert names([leaving, staying], 1, 1) == ["b"]
    assert names([leaving], 1, 1) == []


def test_sampling_spreads_load_from_the_emptiest_pool():
    members = pools(100, *[99] * 15)
    assert {names(members, 1, 1, seed=seed)[0] for seed in range(64)} == {"n0"}
    sampled = Placement(num_sampled=2)
    taken = [names(members, 1, 1, placement=sampled, seed=seed)[0] for seed in range(256)]
    assert set(taken) == {member.name for member in members}


def test_members_of_one_pool_share_its_load():
    members = [Member(f"m{i}", "h", "p", 100, 50) for i in range(4)]
    assert {names(members, 1, 1, seed=seed)[0] for seed in range(64)} == {"m0", "m1", "m2", "m3"}


def test_preferred_member_is_chosen_within_its_pool():
    members = [Member(f"m{i}", "h", "p", 100, 50) for i in range(4)]
    for seed in range(16):
        assert names(members, 1, 1, placement=Placement(preferred=["m2"]), seed=seed) == ["m2"]


def test_explanations():
    members = [
        *pools(90, 50, 0),
        Member("d", "h3", "p3", 100, 100, is_draining=True),
        Member("e", "h4"),
    ]
    assert explain(members, 1, 10, having=["p1"]) == [
        "n0: h0 has no copy; 90% free, the most of 1",
        "d: not chosen: it is draining",
        "e: not chosen: it serves no pool",
        "n1: not chosen: its pool has the object",
        "n2: not chosen: it has no room for 10 bytes: 0",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: place([], -1, 0), "place: num_copies must be an integer from 0 on, got -1"),
        (lambda: place([], 1, 0.5), "place: num_bytes must be an integer from 0 on, got 0.5"),
        (lambda: Placement(preferred="h0"), "Placement: preferred must be a sequence of names"),
        (lambda: Placement(preferred=[1]), "Placement: preferred must be a sequence of names"),
        (lambda: Placement(preferred=None), "Placement: preferred must be a sequence of names"),
        (lambda: Placement(may_evict=1), "Placement: may_evict must be True or False, got 1"),
        (lambda: Placement(near=7), "Placement: near must be a host's name, got 7"),
        (
            lambda: Placement(num_sampled=0),
            "Placement: num_sampled must be an integer from 1 on, got 0",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_sampling_two_keeps_pools_balanced():
    """Each choice knows what the ones before it took: the pools fill alike."""
    random_source = random.Random(1)
    members = {m.name: m for m in pools(*[100] * 40)}
    for _ in range(1000):
        seed = random_source.getrandbits(32)
        sampled = Placement(num_sampled=2)
        for choice in place(members.values(), 2, 1, placement=sampled, seed=seed):
            took = choice.member
            members[took.name] = took.with_free(took.free_bytes - 1)
    free = [member.free_bytes for member in members.values()]
    assert sum(free) == 4000 - 2000
    assert max(free) - min(free) <= 10
