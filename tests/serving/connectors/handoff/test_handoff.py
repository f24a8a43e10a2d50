"""What arrives is what was sent: any ranks, layouts and orders of arrival. Bit by bit."""

import threading

import pytest

import mooncake_kernels as mk
from mooncake_serving.connectors.handoff import REPLICATED, Source
from tests.serving.connectors.handoff.rank import (
    HND,
    NHD,
    Rank,
    contents_of,
    digest_of,
    settings_of,
    source_of,
)
from tests.transfer.support import eventually


def make(stack, role, count, **options) -> list[Rank]:
    ranks = [Rank(role, shard=(rank, count), **options) for rank in range(count)]
    for rank in ranks:
        stack(rank)
    return ranks


@pytest.fixture
def stack():
    ranks: list[Rank] = []
    yield ranks.append
    for rank in reversed(ranks):
        rank.close()


@pytest.mark.parametrize("transports", [["tcp"], ["shm"], ["local"]], ids=lambda t: t[0])
def test_one_rank_to_one(stack, transports):
    [sender] = make(stack, "sender", 1, transports=transports)
    [receiver] = make(stack, "receiver", 1, transports=transports)
    sender.prefill("a", [5, 3, 9, 1, 7], 75)
    receiver.ask("a", source_of(sender), [2, 4, 6, 8, 10], 75)
    assert receiver.result("a") is None
    assert receiver.holds("a", [2, 4, 6, 8, 10], 75)
    sender.released("a")


@pytest.mark.parametrize(
    "num_senders, num_receivers", [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8), (8, 8)]
)
def test_any_number_of_ranks(stack, num_senders, num_receivers):
    senders = make(stack, "sender", num_senders)
    receivers = make(stack, "receiver", num_receivers)
    ids, there = [7, 1, 3, 0], [9, 8, 2, 4]
    for sender in senders:
        sender.prefill("a", ids, 60, step=16)
    for receiver in receivers:
        receiver.ask("a", source_of(*senders), there, 60)
    for receiver in receivers:
        assert receiver.result("a") is None
        assert receiver.holds("a", there, 60)
    for sender in senders:
        sender.released("a")


@pytest.mark.parametrize("num_senders, num_receivers", [(4, 1), (2, 4)])
def test_replicated_caches_come_from_one_rank_each(stack, num_senders, num_receivers):
    senders = make(stack, "sender", num_senders, heads=REPLICATED)
    receivers = make(stack, "receiver", num_receivers, heads=REPLICATED)
    for sender in senders:
        sender.prefill("a", [1, 2], 30)
    for receiver in receivers:
        receiver.ask("a", source_of(*senders), [3, 4], 30)
    for receiver in receivers:
        assert receiver.result("a") is None
        assert receiver.holds("a", [3, 4], 30)
    for sender in senders:  # also those of which nothing was wanted
        sender.released("a")


@pytest.mark.parametrize("axes", [(NHD, HND), (HND, NHD)], ids=["NHD-HND", "HND-NHD"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 16)], ids=str)
@pytest.mark.parametrize("total, first", [(16, 0), (75, 0), (96, 32), (97, 32), (112, 96)])
def test_other_layouts_and_block_sizes(stack, axes, sizes, total, first):
    [sender] = make(stack, "sender", 1, block_size=sizes[0], axes=axes[0])
    receivers = make(stack, "receiver", 2, block_size=sizes[1], axes=axes[1])
    ids = [*range(20, 20 + sender.num_blocks(total))][::-1]
    there = [*range(40, 40 + receivers[0].num_blocks(total))]
    sender.prefill("a", ids, total, step=24)
    for receiver in receivers:
        receiver.ask("a", source_of(sender), there, total, first_token=first)
    for receiver in receivers:
        assert receiver.result("a") is None
        assert receiver.holds("a", there, total, first)
        if first:  # blocks that it had are not written
            assert receiver.read(there, 0, first).isnan().all()


@pytest.mark.parametrize("slot_tokens", [16, 32, 1024])
def test_chunks_stream_while_the_prompt_is_computed(stack, slot_tokens):
    settings = settings_of(slot_bytes=slot_tokens * 3 * 2 * 4 * 8 * 4 + 8192)
    [sender] = make(stack, "sender", 1, settings=settings)
    [receiver] = make(stack, "receiver", 1, settings=settings)
    ids, there = [*range(8)], [*range(8, 16)]
    receiver.ask("a", source_of(sender), there, 120)
    sender.sender.offer("a", digest_of("a"), 120)
    for stop in (32, 64, 96):
        sender.fill("a", ids, stop - 32, stop, 120)
        sender.sender.progress("a", stop, {"0": ids})
        expected = contents_of("a", 120)[:, :, :stop]

        def came(stop=stop, expected=expected):
            return receiver.read(there, 0, stop).equal(expected)

        assert eventually(came)
        assert receiver.read(there, stop, 120).isnan().all()
        assert not receiver.receiver.take_results()
    sender.fill("a", ids, 96, 120, 120)
    sender.sender.progress("a", 120, {"0": ids})
    assert receiver.result("a") is None
    assert receiver.holds("a", there, 120)


def test_many_requests_at_once_through_little_staging(stack):
    senders = make(stack, "sender", 2, settings=settings_of(slot_bytes=16 << 10, num_slots=2))
    receivers = make(stack, "receiver", 2, settings=settings_of(slot_bytes=16 << 10, num_slots=2))
    prompts = [f"p{number}" for number in range(12)]
    ids = {prompt: [*range(5 * n, 5 * n + 5)] for n, prompt in enumerate(prompts)}

    def prefill(sender):
        for prompt in prompts:
            sender.prefill(prompt, ids[prompt], 70, step=32)

    for prompt in prompts[:6]:  # these come first
        for receiver in receivers:
            receiver.ask(prompt, source_of(*senders), ids[prompt], 70)
    threads = [threading.Thread(target=prefill, args=[sender]) for sender in senders]
    for thread in threads:
        thread.start()
    for prompt in prompts[6:]:
        for receiver in receivers:
            receiver.ask(prompt, source_of(*senders), ids[prompt], 70)
    for thread in threads:
        thread.join()
    for prompt in prompts:
        for receiver in receivers:
            assert receiver.result(prompt) is None
            assert receiver.holds(prompt, ids[prompt], 70)
    for receiver in receivers:
        assert eventually(lambda receiver=receiver: receiver.receiver.num_free_slots == 2)


def test_ranks_are_asked_for_at_the_first_one(stack):
    senders = make(stack, "sender", 2)
    [receiver] = make(stack, "receiver", 1)
    source = Source("P", first_rank=senders[0].name)
    receiver.ask("a", source, [1], 10)
    assert eventually(lambda: senders[0].sender._describes)  # it does not know them yet
    senders[0].sender.set_ranks([sender.name for sender in senders])
    receiver.ask("b", source, [2], 10)
    for prompt in "ab":
        for sender in senders:
            sender.prefill(prompt, [4 if prompt == "a" else 5], 10)
    for prompt, ids in (("a", [1]), ("b", [2])):
        assert receiver.result(prompt) is None
        assert receiver.holds(prompt, ids, 10)


def hybrid(block_size: int = 16, num_blocks: int = 64) -> tuple[list, mk.CacheGroups]:
    """A cache with a group of each kind."""
    import torch

    tensors = [torch.full((2, num_blocks, block_size, 4, 8), float("nan")) for _ in range(4)]
    states = torch.full((num_blocks, 24), float("nan"))
    groups = mk.CacheGroups(
        mk.CacheGroup("full", mk.KVView(tensors[:2], NHD)),
        mk.CacheGroup("window", mk.KVView(tensors[2:], NHD), "window", window=40),
        mk.CacheGroup(
            "state", mk.KVView(states, "block dim"), "state", tokens_per_block=block_size
        ),
    )
    return [*tensors, states], groups


def test_groups_of_all_kinds(stack):
    import torch

    (mine, groups), (theirs, others) = hybrid(), hybrid()
    sender, receiver = Rank("sender", groups=groups), Rank("receiver", groups=others)
    stack(sender)
    stack(receiver)
    for tensor in mine:
        tensor.copy_(torch.randn(tensor.shape))
    ids = {"full": [1, 2, 3, 4, 5, 6, 7], "window": [11, 12, 13, 14, 15, 16, 17]}
    ids["state"] = [21, 22, 23, 24, 25, 26, 27]
    there = {name: [block + 30 for block in blocks] for name, blocks in ids.items()}
    sender.sender.offer("a", digest_of("a"), 100)
    receiver.ask("a", source_of(sender), there, 100)
    sender.sender.progress("a", 64, ids)
    sender.sender.progress("a", 100, ids)
    assert receiver.result("a") is None
    for block in ids["full"]:
        for own, other in zip(mine[:2], theirs[:2], strict=True):
            assert torch.equal(own[:, block], other[:, block + 30])
    for place, block in enumerate(ids["window"]):
        for own, other in zip(mine[2:4], theirs[2:4], strict=True):
            if place in groups["window"].needed(100):
                assert torch.equal(own[:, block], other[:, block + 30])
            else:
                assert other[:, block + 30].isnan().all()
    assert torch.equal(mine[4][27], theirs[4][57])
    assert theirs[4][51:57].isnan().all()


def test_the_transport_is_said_once(stack, caplog):
    caplog.set_level("INFO")
    [sender] = make(stack, "sender", 1, transports=["tcp"])
    [receiver] = make(stack, "receiver", 1, transports=["tcp"])
    for prompt in "abc":
        sender.prefill(prompt, [1], 10)
        receiver.ask(prompt, source_of(sender), [1], 10)
        assert receiver.result(prompt) is None
    said = [r.getMessage() for r in caplog.records if " by tcp" in r.getMessage()]
    said = [text for text in said if text.startswith("hand-off")]
    assert sorted(said) == sorted(
        f"hand-off: {one.name} reaches {other.name} by tcp"
        for one, other in ((sender, receiver), (receiver, sender))
    )


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_tcp_is_refused_where_rdma_is_required(stack, side):
    strict = {side: settings_of(require_rdma=True)}
    [sender] = make(stack, "sender", 1, transports=["tcp"], settings=strict.get("sender"))
    [receiver] = make(stack, "receiver", 1, transports=["tcp"], settings=strict.get("receiver"))
    sender.prefill("a", [1], 10)
    receiver.ask("a", source_of(sender), [1], 10)
    assert "require_rdma" in receiver.result("a")
    assert receiver.read([1], 0, 16).isnan().all()


def test_within_a_machine_rdma_is_not_required(stack):
    strict = settings_of(require_rdma=True)
    [sender] = make(stack, "sender", 1, transports=["shm"], settings=strict)
    [receiver] = make(stack, "receiver", 1, transports=["shm"], settings=strict)
    sender.prefill("a", [1], 10)
    receiver.ask("a", source_of(sender), [1], 10)
    assert receiver.result("a") is None


def test_a_rank_may_send_and_receive(stack):
    ranks = [Rank("both"), Rank("both")]
    for rank in ranks:
        stack(rank)
    for (one, other), prompt in ((ranks, "a"), (ranks[::-1], "b")):
        one.prefill(prompt, [1, 2], 32)
        other.ask(prompt, source_of(one), [3, 4], 32)
    for rank, prompt in zip(ranks, "ba", strict=True):
        assert rank.result(prompt) is None
        assert rank.holds(prompt, [3, 4], 32)
