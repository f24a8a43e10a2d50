"""The values of a prompt are evicted from tail to head, whichever calls have used them."""

import contextlib
import random
import threading

import numpy as np
import pytest
import torch

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.compat.mooncake.store import ReplicateConfig, prompt_order

from .store_support import CAPACITY, Memory, pool_file, set_up

KIB = 1024
SIZE = 60 * KIB  # of a value: with its header, 16 of them fit
ROOM = 16 * 64 * KIB
VALUE = bytes(SIZE)
PROMPT = [f"p{i}" for i in range(8)]


@pytest.fixture
def small(path):
    """A store for 16 values."""
    store = set_up(path, ROOM)
    yield store
    store.close()


def press(store, count: int = 1) -> None:
    """Put values that no one reads: in a full pool each evicts one."""
    for _ in range(count):
        press.number += 1
        assert store.put(f"x{press.number}", VALUE) == 0


press.number = 0


def goes_tail_first(store, keys: list[str]) -> None:
    """Under pressure there is a head of the prompt at any time, until nothing is left."""
    store.put("full", VALUE)
    while True:
        there = [store.is_exist(key) for key in keys]
        assert there == sorted(there, reverse=True), there
        if not any(there):
            return
        press(store)


def turns(store) -> None:
    """A prompt whose tail is missing: look it up, read its head, put the rest."""
    assert store.put_batch(PROMPT[:4], [VALUE] * 4) == 0
    for _ in range(3):
        found = store.batch_is_exist(PROMPT).count(1)
        assert store.get_batch(PROMPT[:found]) == [VALUE] * found
        assert store.put_batch(PROMPT[found:], [VALUE] * (8 - found)) == 0


def _in_batches_of_addresses(store) -> None:
    memory = Memory(store)
    p, sizes = memory.address, [SIZE] * 8
    assert store.batch_put_from(PROMPT[:4], [p] * 4, sizes[:4]) == [0] * 4
    assert store.batch_is_exist(PROMPT) == [1] * 4 + [0] * 4
    assert store.batch_get_into(PROMPT[:4], [p] * 4, sizes[:4]) == sizes[:4]
    assert store.batch_put_from_multi_buffers(PROMPT[4:], [[p]] * 4, [[SIZE]] * 4) == [0] * 4
    assert store.batch_get_into_multi_buffers(PROMPT[6:], [[p]] * 2, [[SIZE]] * 2) == [SIZE] * 2


def _in_sessions(store) -> None:
    memory = Memory(store)
    assert store.batch_put_session_start(PROMPT, [SIZE] * 8) == [0] * 8
    for key in PROMPT:
        store.batch_put_from_multi_buffer_ranges([key], [[memory.address]], [[SIZE]], [[0]])
    assert store.batch_put_session_end(PROMPT[:5]) == [0] * 5
    assert store.batch_put_session_end(PROMPT[5:]) == [0] * 3
    assert store.batch_get_session_start(PROMPT) == [0] * 8
    assert store.batch_get_session_end(PROMPT) == 0


def _one_by_one(store) -> None:
    assert store.batch_is_exist(PROMPT) == [0] * 8
    assert [store.put(key, VALUE) for key in PROMPT] == [0] * 8
    assert [store.is_exist(key) for key in PROMPT] == [1] * 8
    assert store.get(PROMPT[6]) == VALUE and store.get(PROMPT[2]) == VALUE


def _looked_up_last(store) -> None:
    assert [store.put(key, VALUE) for key in PROMPT] == [0] * 8
    assert store.batch_is_exist(PROMPT) == [1] * 8


def _one_by_one_by_address(store) -> None:
    memory = Memory(store)
    assert [store.put_from(key, memory.address, SIZE) for key in PROMPT] == [0] * 8
    assert store.batch_is_exist(PROMPT) == [1] * 8
    for key in PROMPT[3:]:
        assert store.get_into(key, memory.address, SIZE) == SIZE
    assert store.get_into_ranges([memory.address], [PROMPT[7:]], [[[0]]], [[[9]]], [[[8]]]) == [
        [[8]]
    ]


def _tensors(store) -> None:
    tensor = torch.zeros(SIZE // 4 - 64)
    assert store.batch_put_tensor(PROMPT[:3], [tensor] * 3) == [0] * 3
    assert [one is not None for one in store.batch_get_tensor(PROMPT)] == [True] * 3 + [False] * 5
    assert store.batch_put_tensor(PROMPT[3:], [tensor] * 5) == [0] * 5
    assert store.get_tensor(PROMPT[7]) is not None


def _replaced(store) -> None:
    assert store.put_batch(PROMPT, [VALUE] * 8) == 0
    assert store.upsert_batch(PROMPT[5:], [VALUE] * 3) == 0
    assert store.upsert(PROMPT[7], VALUE) == 0


def _described(store) -> None:
    assert store.put_batch(PROMPT, [VALUE] * 8) == 0
    assert len(store.batch_get_replica_desc(PROMPT[2:])) == 6
    assert store.get_size(PROMPT[7]) == SIZE and store.get_replica_desc(PROMPT[6])


def _handles(store) -> None:
    assert store.put_batch(PROMPT, [VALUE] * 8) == 0
    held = store.batch_get_buffer(PROMPT[2:])
    assert all(one is not None for one in held)
    assert store.get_buffer(PROMPT[5]) is not None


@pytest.mark.parametrize(
    "calls",
    [turns, _in_batches_of_addresses, _in_sessions, _one_by_one, _looked_up_last,
     _one_by_one_by_address, _tensors, _replaced, _described, _handles],
)  # fmt: skip
def test_head_of_a_prompt_is_evicted_last(small, calls):
    calls(small)
    assert small.batch_is_exist(PROMPT) == [1] * 8
    goes_tail_first(small, PROMPT)


def test_prompt_larger_than_the_pool_keeps_its_head(small):
    keys = [f"k{i}" for i in range(40)]
    assert small.put_batch(keys, [VALUE] * 40) == 0
    there = small.batch_is_exist(keys)
    assert there == [1] * sum(there) + [0] * (40 - sum(there)) and sum(there) > 10


def test_hard_pins_are_put_head_first(small):
    keys, config = [f"k{i}" for i in range(40)], ReplicateConfig(with_hard_pin=True)
    assert small.put_batch(keys, [VALUE] * 40, config) == -200
    there = small.batch_is_exist(keys)
    assert there == [1] * sum(there) + [0] * (40 - sum(there)) and sum(there) > 10


def test_of_a_repeated_key_the_first_value_counts(small):
    memory = Memory(small)
    p = memory.address
    assert small.put_batch(["a", "b", "a"], [b"1", b"2", b"3"]) == 0 and small.get("a") == b"1"
    assert small.batch_put_from(["c", "d", "c"], [p, p, p + 1], [1, 1, 1]) == [0] * 3
    assert small.get("c") == memory.at(0, 1)
    assert small.upsert_batch(["a", "b", "a"], [b"1", b"2", b"3"]) == 0 and small.get("a") == b"3"


def test_shared_prefix_is_kept_while_one_prompt_is_used(small):
    """To use one of them keeps what they share, and lets the other go from its end."""
    shared, one, two = PROMPT[:3], ["a3", "a4", "a5"], ["b3", "b4", "b5"]
    assert small.put_batch([*shared, *one], [VALUE] * 6) == 0
    assert small.batch_is_exist([*shared, *two]) == [1] * 3 + [0] * 3
    assert small.put_batch(two, [VALUE] * 3) == 0
    for key in reversed(one):
        assert small.get(key) == VALUE
    small.put("full", VALUE)
    while any(small.batch_is_exist([*shared, *one, *two])):
        for tail in (one, two):
            there = [small.is_exist(key) for key in [*shared, *tail]]
            assert there == sorted(there, reverse=True), there
        press(small)


def test_another_process_evicts_in_that_order(path, small):
    with contextlib.closing(set_up(path, ROOM)) as other:
        assert small.batch_is_exist(PROMPT) == [0] * 8
        assert [small.put(key, VALUE) for key in PROMPT] == [0] * 8
        assert small.batch_is_exist(["a", "b"]) == [0, 0]  # or any other batch
        assert is_in_order(path, small, PROMPT)
        goes_tail_first(other, PROMPT)


def test_close_leaves_prompts_in_order(path):
    with contextlib.closing(set_up(path, CAPACITY)) as other:
        with contextlib.closing(set_up(path, CAPACITY)) as store:
            threads = threading.active_count()
            assert store.batch_is_exist(PROMPT) == [0] * 8
            assert [store.put(key, VALUE) for key in PROMPT] == [0] * 8
            assert not is_in_order(path, store, PROMPT)
            assert threading.active_count() == threads
        assert is_in_order(path, other, PROMPT)


def test_of_many_single_calls_few_are_not_in_order_yet(path):
    keys = [f"k{i}" for i in range(100)]
    with contextlib.closing(set_up(path, CAPACITY)) as store:
        assert store.batch_is_exist(keys) == [0] * 100
        assert [store.put(key, VALUE) for key in keys] == [0] * 100
        assert is_in_order(path, store, keys[:64])


def is_in_order(path: str, store, keys: list[str]) -> bool:
    """Whether each of these that is there was used later than all after it."""
    recency = recency_of(path, store)
    times = [recency[key] for key in keys if key in recency]
    return times == sorted(times, reverse=True) and len(set(times)) == len(times)


def recency_of(path: str, store) -> dict[str, int]:
    objects = store._running().backend
    with ObjectPool.open(path) as pool:
        found = pool.objects()
    names = {tuple(key): name for name in objects.names() for key in [objects._keyspace.key(name)]}
    pairs = zip(map(tuple, found.keys.tolist()), found.recency.tolist(), strict=True)
    return {names[key]: time for key, time in pairs if key in names}


def tree(rng: random.Random) -> list[list[str]]:
    """Prompts, of which some begin like others."""
    prompts: list[list[str]] = []
    for number in range(6):
        head = rng.choice(prompts)[: rng.randrange(1, 8)] if prompts and rng.random() < 0.7 else []
        prompts.append([*head, *(f"{number}.{i}" for i in range(len(head), 8))])
    return prompts


def use(store, call: int, prompt: list[str], some: list[str], p: int) -> None:
    """One of the calls with a part of a prompt."""
    values, pointers, sizes = [VALUE] * len(some), [p] * len(some), [SIZE] * len(some)
    calls = [
        lambda: store.put_batch(some, values),
        lambda: store.get_batch(some),
        lambda: store.batch_put_from(some, pointers, sizes),
        lambda: store.batch_get_into(some, pointers, sizes),
        lambda: [store.put(key, VALUE) for key in some],
        lambda: [store.get(key) for key in some],
        lambda: [store.get_into(key, p, SIZE) for key in reversed(some)],
        lambda: store.batch_is_exist(prompt),
        lambda: store.upsert_batch(some, values),
        lambda: store.batch_remove(some[-1:]),
        lambda: press(store),
    ]
    calls[call]()


@pytest.mark.parametrize("seed", range(12))
def test_order_holds_after_arbitrary_calls(path, seed):
    """Each value of prompts that are known was used later than what continues it."""
    rng = random.Random(seed)
    with contextlib.closing(set_up(path, 2 * ROOM)) as store:
        memory, prompts = Memory(store), tree(rng)
        for prompt in prompts:
            store.batch_is_exist(prompt)
        for _ in range(120):
            use_some(store, rng, rng.choice(prompts), memory.address)
            if rng.random() < 0.5:
                store._running().backend._order.catch_up()
                for prompt in prompts:
                    assert is_in_order(path, store, prompt)


@pytest.mark.parametrize("seed", range(12))
def test_prompts_of_which_parts_were_known(path, seed):
    """Once each prompt was shown and used as a whole, all of them are in order."""
    rng = random.Random(seed)
    with contextlib.closing(set_up(path, 2 * ROOM)) as store:
        memory, prompts = Memory(store), tree(rng)
        for _ in range(60):
            use_some(store, rng, rng.choice(prompts), memory.address)
        for _ in range(2):
            for prompt in prompts:
                store.batch_is_exist(prompt)
                store.get_batch(prompt)
        for prompt in prompts:
            assert is_in_order(path, store, prompt)
            assert store._running().backend._order.prompt_to(prompt[-1]) == prompt


def use_some(store, rng: random.Random, prompt: list[str], p: int) -> None:
    """Use a part of a prompt, with gaps at times."""
    first = rng.randrange(8)
    some = prompt[first : rng.randrange(first, 8) + 1]
    if rng.random() < 0.2:
        some = sorted(rng.sample(prompt, rng.randrange(1, 9)), key=prompt.index)
    use(store, rng.randrange(11), prompt, some, p)


@pytest.mark.parametrize(
    ("batches", "ways"),
    [
        (["abcd", "bc", "abcd"], ["abcd"]),
        (["abcd", "bd", "ac"], ["abcd"]),  # parts of it, with gaps
        (["abcd", "abxy", "axyz"], ["abcd", "abxyz"]),  # two that begin alike
        (["cd", "abcd"], ["abcd"]),
        (["ac", "abc"], ["abc"]),
        (["abcd", "bxd"], ["abxd", "abc"]),  # the latest counts
        (["abc", "cba"], ["cba"]),
        (["abc", "ca"], ["ca"]),
        (["aba"], ["ba"]),
        (["aab"], ["ab"]),
    ],
)
def test_prompt_order_is_learned_from_batches(small, batches, ways):
    for batch in batches:
        small.batch_is_exist([*batch])
    order = small._running().backend._order
    assert ["".join(order.prompt_to(way[-1])) for way in ways] == ways


def test_keys_in_any_order_belong_to_no_prompt(small):
    """Each batch counts by itself: what is put in order does not become ever longer."""
    order, rng = small._running().backend._order, random.Random(1)
    keys, lengths = [f"k{i}" for i in range(3000)], []
    for _ in range(3000):
        batch = rng.sample(keys, 10)
        small.batch_is_exist(batch)
        lengths.append(len(order.prompt_to(batch[-1])))
    assert sum(lengths[1000:]) / 2000 < 100


def test_the_number_of_known_keys_is_bounded(path, monkeypatch):
    monkeypatch.setattr(prompt_order, "MAX_NAMES", 100)
    monkeypatch.setattr(prompt_order, "MAX_PROMPT", 10)
    with contextlib.closing(set_up(path, 2 * ROOM)) as store:
        order = store._running().backend._order
        assert store.put_batch(PROMPT, [VALUE] * 8) == 0
        for i in range(100):
            store.batch_is_exist([f"{i}.{k}" for k in range(25)])
            store.batch_is_exist([f"{i}.{k}" for k in range(5, 9 if i % 2 else 1)])
            assert len(order._before) <= 100
        assert order.prompt_to(PROMPT[7]) == PROMPT  # what is there, is known longest
        goes_tail_first(store, PROMPT)


def test_threads(path):
    with contextlib.closing(set_up(path, 2 * ROOM)) as store:
        prompts = tree(random.Random(5))

        def run(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(60):
                prompt = rng.choice(prompts)
                found = store.batch_is_exist(prompt).count(1)
                store.get_batch(prompt[:found])
                store.put_batch(prompt[found:], [VALUE] * (8 - found))

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt in prompts:
            store.batch_is_exist(prompt)
            store.get_batch(prompt)
        assert all(is_in_order(path, store, prompt) for prompt in prompts)


def test_keys_of_an_array_and_of_bytes(small):
    assert small.batch_is_exist(np.array(PROMPT)) == [0] * 8
    for key in PROMPT:
        assert small.put(key.encode(), VALUE) == 0
    goes_tail_first(small, PROMPT)


def test_batch_with_invalid_keys_keeps_order(small):
    wrong = [*PROMPT[:3], "\ud800", *PROMPT[3:]]
    assert small.get_batch(wrong) == [b""] * 9
    assert small.put_batch(wrong, [VALUE] * 9) == -600
    assert small.batch_is_exist(PROMPT) == [1] * 8
    goes_tail_first(small, PROMPT)


def test_tail_of_a_prompt_moves_to_the_ssd_first(path, tmp_path, monkeypatch):
    """What leaves the pool first is the tail, which the SSD then has."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(64 << 20))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", str(4 << 20))
    options = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}
    with pool_file() as other, contextlib.closing(set_up(other, ROOM, **options)) as store:
        turns(store)
        own = store._running().backend.own
        in_pool = [True]
        while any(in_pool):
            press(store)
            in_pool = own.pool.contains_each(own.keyspace.keys(PROMPT)).tolist()
            assert in_pool == sorted(in_pool, reverse=True)
        assert store.get_batch(PROMPT) == [VALUE] * 8
