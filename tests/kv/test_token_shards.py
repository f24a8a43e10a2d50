"""Context parallelism: ranks that hold every nth token, or run of tokens, of a request."""

import dataclasses
from itertools import product

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.kv import groups_copy
from mooncake_kernels.kv.token_shard import TokenShard

from .group_caches import packed, view
from .layouts import addressed, snapshot

BLOCKS, HEADS, WINDOW = 20, 4, 9
LONGEST = 40
TRUTH = {  # [layer, kv, token, head, dim]: what each token of the request has
    "full": [
        addressed((2, 2, LONGEST, HEADS, 8), torch.int16, "cpu", 1),
        addressed((2, 2, LONGEST, HEADS, 3), torch.uint8, "cpu", 2),
    ],
    "window": [addressed((1, 1, LONGEST, 1, 20), torch.int16, "cpu", 3)],
}


class Rank:
    """A rank's cache, and its block table for a request."""

    def __init__(self, shard, block_size, num_tokens, seed, heads=slice(0, HEADS), order="nhd"):
        names = {"nhd": "kv block token head dim", "hnd": "kv block head token dim"}[order]
        sizes = {"block": BLOCKS, "token": block_size, "head": heads.stop - heads.start}
        kv = view(names, 2, seed, dim=8, **sizes)
        scales = view(names, 2, seed + 9, torch.uint8, dim=3, **sizes)
        latent = view("block token dim", 1, seed + 20, block=BLOCKS, token=block_size, dim=20)
        self.groups = mk.CacheGroups(
            mk.CacheGroup("full", [kv, scales], token_shard=shard),
            mk.CacheGroup("window", latent, "window", window=WINDOW, token_shard=shard),
        )
        self.heads, self.num_tokens, self.size = heads, num_tokens, block_size
        rank, num_ranks, run = shard
        self.held = [t for t in range(num_tokens) if t // run % num_ranks == rank]
        table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed))
        needed = self.groups.needed(num_tokens)
        self.tables = {"full": table, "window": table.flip(0)}
        self.ids = {name: self.tables[name][list(places)] for name, places in needed.items()}
        self.firsts = {name: places.start for name, places in needed.items()}

    def places(self, name):
        """Return each token that a group needs here, its block, and its place in the block."""
        first = self.num_tokens - WINDOW + 1 if name == "window" else 0
        return [
            (token, int(self.tables[name][i // self.size]), i % self.size)
            for i, token in enumerate(self.held)
            if token >= first
        ]

    def each(self):
        """Return where each token's bytes are here, and what they are to be."""
        for name, group in self.groups.items():
            for cache, truth in zip(group.views, TRUTH[name], strict=True):
                for layer, kv in product(range(cache.num_layers), range(cache.num_kv)):
                    plane = cache.plane(layer, kv)
                    heads = self.heads if cache.has_heads else slice(None)
                    for token, block, offset in self.places(name):
                        yield plane[block, :, offset], truth[layer, kv, token, heads]

    def fill(self):
        for here, truth in self.each():
            here.copy_(truth)
        return self

    def check(self):
        """Check all tokens, and that blocks of others are as they were."""
        for here, truth in self.each():
            assert torch.equal(here, truth)
        for name, group in self.groups.items():
            own = set(self.ids[name].tolist())
            others = [block for block in range(BLOCKS) if block not in own]
            for cache, before in zip(group.views, self.before[name], strict=True):
                for plane, was in zip(planes(cache), before, strict=True):
                    assert torch.equal(plane[others], was[others])

    def remember(self):
        self.before = {
            name: [[plane.clone() for plane in planes(cache)] for cache in group.views]
            for name, group in self.groups.items()
        }
        return self


def planes(cache):
    return [cache.plane(i, kv) for i, kv in product(range(cache.num_layers), range(cache.num_kv))]


def ranks(num_ranks, run, *arguments, **options):
    return [Rank((r, num_ranks, run), *arguments, **options) for r in range(num_ranks)]


SIZES = [  # tokens of a block on both sides, of a run on both sides; None: as of a block
    (4, 4, 1, 1),
    (4, 4, None, None),
    (4, 4, 1, None),
    (4, 4, None, 2),
    (8, 4, 1, 1),
    (4, 8, None, None),
]


@pytest.mark.parametrize(("src_ranks", "dst_ranks"), list(product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize(("src_size", "dst_size", "src_run", "dst_run"), SIZES)
@pytest.mark.parametrize("num_tokens", [2, 33])
def test_tokens_of_any_ranks_to_any(
    src_ranks, dst_ranks, src_size, dst_size, src_run, dst_run, num_tokens
):
    """Each receiver takes from each sender, whose blocks may be partly filled, what it has."""
    theirs = ranks(src_ranks, src_run or src_size, src_size, num_tokens, 100)
    for src in theirs:
        src.fill()
    for how in ("plan", "packer"):
        for dst in ranks(dst_ranks, dst_run or dst_size, dst_size, num_tokens, 900, order="hnd"):
            dst.remember()
            for src in theirs:
                move(src, dst, how)
            dst.check()


def move(src, dst, how):
    if how == "plan":
        options = {"src_first_blocks": src.firsts, "dst_first_blocks": dst.firsts}
        mk.GroupsPlan(src.groups, dst.groups).run(src.ids, dst.ids, **options)
        return None
    header, staging = packed(src.groups, src.ids, first_blocks=src.firsts)
    packer = mk.GroupsPacker(dst.groups)
    return packer.unpack(header.to_bytes(), staging, dst.ids, first_blocks=dst.firsts)


def test_tensor_and_context_parallelism_at_once():
    """Ranks of half the heads, each of half the tokens, to one of a third of these."""
    dst = Rank((1, 3, 2), 4, 31, 900, heads=slice(1, 3)).remember()
    unpacker = mk.GroupsPacker(dst.groups, first_head={"full": 1})
    for first, shard in product((0, 2), ((0, 2, 4), (1, 2, 4))):
        src = Rank(shard, 4, 31, 100, heads=slice(first, first + 2), order="hnd").fill()
        packer = mk.GroupsPacker(src.groups, first_head={"full": first})
        counts = {name: len(ids) for name, ids in src.ids.items()}
        staging = torch.zeros(packer.header(counts).num_bytes, dtype=torch.uint8)
        header = packer.pack(src.ids, staging, first_blocks=src.firsts)
        assert unpacker.unpack(header, staging, dst.ids, first_blocks=dst.firsts)
    dst.check()


@pytest.mark.parametrize("how", ["plan", "packer"])
def test_a_chunk_goes_to_its_places_in_a_table(how):
    """A sender may hand over a few blocks at a time; the receiver gives its whole table."""
    src, dst = Rank((0, 1, 1), 4, 32, 100).fill(), Rank((1, 2, 1), 4, 32, 900).remember()
    ids, src.firsts["window"] = dict(src.ids), 6
    for first in (4, 0, 6, 2):
        src.ids = {"full": ids["full"][first : first + 2], "window": ids["window"]}
        src.firsts["full"] = first
        move(src, dst, how)
    dst.check()


def test_holes_are_skipped():
    src, dst = Rank((0, 1, 1), 4, 32, 100).fill(), Rank((0, 2, 1), 4, 32, 900)
    before = [snapshot(cache) for cache in dst.groups["full"].views]
    ids = dst.ids["full"].clone()
    dst.ids["full"] = torch.tensor([-1] * len(ids))
    for how in ("plan", "packer"):
        move(src, dst, how)
    for cache, was in zip(dst.groups["full"].views, before, strict=True):
        assert torch.equal(snapshot(cache), was)


def test_ranks_without_common_tokens_copy_nothing():
    src, dst = Rank((0, 2, 4), 4, 32, 100), Rank((1, 2, 4), 4, 32, 900)
    before = [snapshot(cache) for group in dst.groups.values() for cache in group.views]
    assert move(src, dst, "packer") is False
    move(src, dst, "plan")
    after = [snapshot(cache) for group in dst.groups.values() for cache in group.views]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_checksums_are_of_records_that_are_needed():
    src, dst = Rank((0, 1, 1), 4, 32, 100).fill(), Rank((1, 2, 4), 4, 32, 900)
    header, staging = packed(src.groups, {"full": src.ids["full"]})
    packer, ids = mk.GroupsPacker(dst.groups), {"full": dst.ids["full"]}
    record = header["full"].packed.record_bytes
    staging[5] ^= 1  # of record 0, whose tokens rank 0 holds
    assert packer.unpack(header, staging, ids)
    staging[record + 5] ^= 1
    before = [snapshot(cache) for cache in dst.groups["full"].views]
    with pytest.raises(mk.ChecksumError, match="group 'full': staging: record 1 must have"):
        packer.unpack(header, staging, ids)
    for cache, was in zip(dst.groups["full"].views, before, strict=True):
        assert torch.equal(snapshot(cache), was)


def test_plan_returns_the_checksum_of_each_token():
    src, dst = Rank((0, 1, 1), 4, 32, 100).fill(), Rank((1, 2, 1), 4, 32, 900)
    plan = mk.GroupsPlan(src.groups, dst.groups, checksum=True)
    sums = plan.run({"full": src.ids["full"]}, {"full": dst.ids["full"]})["full"]
    tokens = mk.shard_tokens(32, (0, 1, 1), (1, 2, 1))
    slots = [
        rank.ids["full"][numbers // 4] * 4 + numbers % 4
        for rank, numbers in zip((src, dst), tokens, strict=True)
    ]
    views = (rank.groups["full"].views for rank in (src, dst))
    assert torch.equal(sums, mk.CopyPlan(*views, checksum=True).run_slots(*slots))


@pytest.mark.parametrize("kind", ["full", "window", "encoder"])
def test_needed_blocks_and_hits_are_the_definition(kind):
    window = 6 if kind == "window" else None
    for shard, num_tokens in product([(0, 2, 1), (1, 2, 4), (2, 3, 2), (3, 4, 1)], range(40)):
        cache = view("block token dim", 1, 1, token=4, dim=2)
        group = mk.CacheGroup("g", cache, kind, window=window, token_shard=shard)
        rank, num_ranks, run = shard
        held = [t for t in range(num_tokens) if t // run % num_ranks == rank]
        first = num_tokens - 6 + 1 if kind == "window" else 0
        places = sorted({i // 4 for i, token in enumerate(held) if token >= first})
        assert [*group.needed(num_tokens, num_tokens)] == places
        groups = mk.CacheGroups(group) if kind != "encoder" else None
        if groups is not None and num_tokens % groups.tokens_per_hit == 0:
            blocks = range(num_tokens // groups.tokens_per_hit + 1)
            assert groups.longest_hit({"g": [i in places for i in blocks]}) == num_tokens


def test_header_says_which_tokens():
    src = Rank((1, 2, 4), 4, 32, 100)
    header, _ = packed(src.groups, src.ids)
    assert mk.GroupsHeader.from_bytes(header.to_bytes()) == header
    assert header["full"].token_shard == (1, 2, 4)
    plain, _ = packed(Rank((0, 1, 4), 4, 32, 100).groups, {"full": [1]})
    assert plain["full"].token_shard == (0, 1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"token_shard": (2, 2, 1)},
        {"token_shard": (0, 2, 3)},
        {"token_shard": (0, 2, 0)},
        {"token_shard": (0, 2.0, 1)},
        {"token_shard": (0, 1 << 21, 1)},
        {"token_shard": (0, 2)},
        {"token_shard": (0, 1, 4)},
        {"token_shard": None},
        {"tokens_per_block": 8},
        {"kind": "state", "window": None},
    ],
)
def test_forged_header_is_refused(change):
    src, dst = Rank((1, 2, 1), 4, 32, 100), Rank((0, 1, 1), 4, 32, 900)
    header, staging = packed(src.groups, {"window": src.ids["window"]})
    lie = mk.GroupsHeader((dataclasses.replace(header.groups[0], **change),))
    with pytest.raises(mk.InvalidArgument, match="^GroupsHeader: data must"):
        mk.GroupsHeader.from_bytes(lie.to_bytes())
    with pytest.raises(mk.InvalidArgument, match="header must be a GroupsHeader or its bytes"):
        mk.GroupsPacker(dst.groups).unpack(lie, staging, {"window": dst.ids["window"]})


def test_one_rank_has_one_token_shard():
    header, _ = packed(Rank((0, 1, 1), 4, 32, 100).groups, {"window": [1]})
    lie = dataclasses.replace(header.groups[0], token_shard=TokenShard(0, 1, 4))
    assert header.check() and not mk.GroupsHeader((lie,)).check()
    with pytest.raises(mk.InvalidArgument, match=r"token_shard \(0, 1, 1\) if .*, got \(0, 1, 4\)"):
        mk.GroupsHeader.from_bytes(mk.GroupsHeader((lie,)).to_bytes())


def test_records_of_another_kind_are_refused_before_their_tokens_are_counted(monkeypatch):
    """A forged header costs no memory."""
    monkeypatch.setattr(groups_copy, "common_tokens", lambda *arguments: pytest.fail("counted"))
    src, dst = group(token_shard=(0, 2, 1)), Rank((0, 1, 1), 4, 32, 900)
    other = mk.CacheGroup("full", src.views, token_shard=src.token_shard)
    sent = packed(mk.CacheGroups(other), {"full": [1]})
    with pytest.raises(mk.InvalidArgument, match="'full': header must have 2 views, got 1"):
        mk.GroupsPacker(dst.groups).unpack(*sent, {"full": [1]})


def unpacked(ids, src_first=0, **options):
    src, dst = Rank((0, 2, 1), 4, 40, 100), Rank((0, 1, 1), 4, 40, 900)
    sent = packed(src.groups, {"full": src.ids["full"]}, first_blocks={"full": src_first})
    return mk.GroupsPacker(dst.groups).unpack(*sent, {"full": ids}, **options)


def planned(ids, **options):
    src, dst = Rank((0, 2, 1), 4, 40, 100), Rank((0, 1, 1), 4, 40, 900)
    plan = mk.GroupsPlan(src.groups, dst.groups)
    return plan.run({"full": src.ids["full"]}, {"full": ids}, **options)


def group(axes="block token dim", kind="full", **options):
    sizes = {"token": 4, "head": 1, "dim": 2}
    return mk.CacheGroup("g", view(axes, 1, 1, **sizes), kind, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: group(token_shard=(2, 2, 1)),
         r"^CacheGroup: token_shard must be \(rank, number of ranks, .*, got \(2, 2, 1\)"),
        (lambda: group(token_shard=4), "token_shard must be .*, got 4"),
        (lambda: group(token_shard=(0, 2, 3)),
         "token_shard must have runs that divide blocks of 4 tokens, got 3"),
        (lambda: group("block dim", tokens_per_block=4, token_shard=(0, 2, 1)),
         r"must be None for states and views without .*, got \(0, 2, 1\) for a view 'block dim'"),
        (lambda: group(kind="state", token_shard=(0, 2, 1)), "got .* for kind 'state'"),
        (lambda: unpacked([0] * 3),
         "unpack: group 'full': block_ids must be of blocks with token 12 .*, got 3 from place 0"),
        (lambda: unpacked(range(10), first_blocks={"full": 3}),
         "block_ids must be of blocks with token 8 .*, got 10 from place 3"),
        (lambda: unpacked([*range(9), BLOCKS]), r"group 'full': block_ids\[9\] must be -1 or in"),
        (lambda: unpacked([0] * 10, first_blocks={"full": -1}),
         "group 'full': first_blocks must be an integer in 0"),
        (lambda: unpacked([0] * 10, first_blocks={"fully": 0}),
         r"first_blocks must be a mapping of some of the groups .*, got \['fully'\]"),
        (lambda: unpacked([0] * 10, 1 << 39),
         "group 'full': block tables must be of at most 1099511627776 tokens"),
        (lambda: planned([0] * 3),
         "run: group 'full': dst_blocks must be of blocks with token 12 .*, got 3 from place 0"),
        (lambda: planned([*range(9), BLOCKS]), r"'full': dst_blocks\[9\] must be -1 or in"),
        (lambda: planned([0] * 10, dst_first_blocks={"full": 1.5}),
         "group 'full': dst_first_blocks must be an integer"),
        (lambda: planned([0] * 10, src_first_blocks=[1]), "src_first_blocks must be a mapping"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        make()


def test_caches_without_tokens_are_refused():
    src, dst = group(token_shard=(0, 2, 1)), group("block dim", tokens_per_block=4)
    with pytest.raises(mk.InvalidArgument, match="group 'g': .*must have a 'token' axis"):
        mk.GroupsPlan(mk.CacheGroups(src), mk.CacheGroups(dst))
    sent = packed(mk.CacheGroups(src), {"g": [1]})
    with pytest.raises(mk.InvalidArgument, match="group 'g': header must have .* 'token' axis"):
        mk.GroupsPacker(mk.CacheGroups(dst)).unpack(*sent, {"g": [1]})


def test_states_go_to_the_same_place_only():
    state = mk.CacheGroups(group("block dim", "state", tokens_per_block=4))
    sent = packed(state, {"g": [1]}, first_blocks={"g": 5})
    packer = mk.GroupsPacker(state)
    assert packer.unpack(*sent, {"g": [3]}, first_blocks={"g": 5})
    with pytest.raises(mk.InvalidArgument, match="'g': block_ids must be, .* from place 4 on with"):
        packer.unpack(*sent, {"g": [3]}, first_blocks={"g": 4})


def test_a_window_without_its_first_block_is_refused():
    src, dst = Rank((1, 2, 1), 4, 33, 100), Rank((0, 1, 1), 4, 33, 900)
    header, staging = packed(
        src.groups, {"window": src.ids["window"][-1:]}, first_blocks={"window": 3}
    )
    with pytest.raises(mk.InvalidArgument, match="blocks with token 12 of .*, got 3 from place 0"):
        mk.GroupsPacker(dst.groups).unpack(header, staging, {"window": dst.ids["window"]})
