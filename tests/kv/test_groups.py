"""Caches of several groups of layers: what a prefix needs, copies and packed buffers."""

import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk

from .group_caches import (
    BLOCKS,
    MODELS,
    gpt_oss,
    packed,
    qwen,
    rank_of,
    view,
)
from .layouts import addressed, snapshot


def heads_of(groups: mk.CacheGroups, heads: slice) -> dict[str, slice]:
    return {name: heads for name, group in groups.items() if group.views[0].has_heads}


SRC_IDS, DST_IDS = [5, -1, 2], [0, 3, 4]
SHARDS = [(4, *ranks) for ranks in product((1, 2, 4), repeat=2)]  # heads, ranks of both sides
SHARDS += [(2, 4, 1), (2, 4, 2), (2, 1, 4), (2, 4, 4), (1, 4, 2)]  # heads that several ranks have


@pytest.mark.parametrize(("src_model", "dst_model"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("heads", "src_ranks", "dst_ranks"), SHARDS)
def test_any_tensor_parallel_size_to_any(src_model, dst_model, heads, src_ranks, dst_ranks):
    """By a plan and through packed buffers: the bytes of a copy between single ranks."""
    src_whole, dst_whole, expected = (
        src_model(heads, 1), dst_model(heads, 500), dst_model(heads, 500)
    )  # fmt: skip
    ids = dict.fromkeys(expected, SRC_IDS), dict.fromkeys(expected, DST_IDS)
    mk.GroupsPlan(src_whole, expected).run(*ids)
    to = {name: [DST_IDS[0], -1, DST_IDS[2]] for name in expected}  # a hole on both sides

    def rank_with(model, whole, rank, num_ranks):
        part = model(max(1, heads // num_ranks), 0)
        return rank_of(whole, part, rank * heads // num_ranks)

    srcs = [rank_with(src_model, src_whole, rank, src_ranks) for rank in range(src_ranks)]
    for rank in range(dst_ranks):
        copied, unpacked = (rank_with(dst_model, dst_whole, rank, dst_ranks) for _ in "12")
        first_head = dict.fromkeys(unpacked, rank * heads // dst_ranks)
        unpacker = mk.GroupsPacker(unpacked, first_head=first_head)
        for src_rank, src in enumerate(srcs):
            shards = mk.shard_heads(heads, (src_rank, src_ranks), (rank, dst_ranks))
            if shards is not None:
                of_groups = [heads_of(src, heads) for heads in shards]
                plan = mk.GroupsPlan(src, copied, src_heads=of_groups[0], dst_heads=of_groups[1])
                plan.run(*ids)
            first_head = dict.fromkeys(src, src_rank * heads // src_ranks)
            packer = mk.GroupsPacker(src, first_head=first_head)
            staging = torch.zeros(packer.header(dict.fromkeys(src, 3)).num_bytes, dtype=torch.uint8)
            header = packer.pack(ids[0], staging)
            unpacker.unpack(header.to_bytes(), staging, to)
        right = rank_with(dst_model, expected, rank, dst_ranks)
        for name, group in right.items():
            views = (group.views, copied[name].views, unpacked[name].views)
            for wanted, by_plan, by_packer in zip(*views, strict=True):
                assert torch.equal(snapshot(by_plan), snapshot(wanted)), (name, rank)
                assert torch.equal(snapshot(by_packer), snapshot(wanted)), (name, rank)


def interleaved(scales):
    """Scales ``[..., token, dim]`` with 4 tokens side by side, as of TensorRT-LLM's values."""
    tokens, dim = scales.shape[-2:]
    tiles = scales.unflatten(-2, (tokens // 4, 4)).transpose(-1, -2)
    return tiles.reshape(*scales.shape[:-2], tokens * dim)


def test_interleaved_scales_are_split_by_heads_but_not_by_tokens():
    linear = addressed((BLOCKS, 4, 16, 8), torch.float8_e4m3fn, "cpu", 3).view(torch.uint8)

    def rank(heads, scales, tokens=16):
        data = view("block head token dim", 1, 9, torch.uint8, head=heads, token=tokens, dim=64)
        return mk.CacheGroups(
            mk.CacheGroup("full", [data, mk.KVView(scales, axes="block head dim")])
        )

    header, staging = packed(rank(4, interleaved(linear)), {"full": [5, 2]})
    half = torch.zeros(BLOCKS, 2, 16 * 8, dtype=torch.uint8)
    packer = mk.GroupsPacker(rank(2, half), first_head={"full": 2})
    assert packer.unpack(header, staging, {"full": [0, 4]})
    assert torch.equal(half[[0, 4]], interleaved(linear[[5, 2], 2:]))
    smaller = rank(4, torch.zeros(BLOCKS, 4, 8 * 8, dtype=torch.uint8), tokens=8)
    with pytest.raises(
        mk.InvalidArgument, match="'full': .*dst must have src's head_dim 128, got 64"
    ):
        mk.GroupsPlan(rank(4, interleaved(linear)), smaller)
    with pytest.raises(mk.InvalidArgument, match="header must have the cache's dim 64, got 128"):
        mk.GroupsPacker(smaller).unpack(header, staging, {"full": [0, 1, 2, 3]})


def test_block_sizes_may_differ_where_blocks_have_tokens():
    src, dst = qwen(2, 1, tokens=4), qwen(2, 500, tokens=8)
    header, staging = packed(src, {"full": [5, 2, 1], "delta": [3]})
    assert mk.GroupsPacker(dst).unpack(header, staging, {"full": [4, 0], "delta": [1]})
    one, two = src["full"].views[0], dst["full"].views[0]
    assert torch.equal(two.plane(0, 1)[4, :, 4:], one.plane(0, 1)[2])
    assert torch.equal(two.plane(0, 1)[0, :, :4], one.plane(0, 1)[1])
    assert torch.equal(dst["delta"].views[0].plane(2, 0)[1], src["delta"].views[0].plane(2, 0)[3])


@pytest.mark.parametrize("num_tokens", [17, 20, 23])
def test_tokens_of_a_window_keep_their_places_in_other_block_sizes(num_tokens):
    """Whose first blocks begin at different tokens."""
    src, dst = gpt_oss(2, 1, tokens=8), gpt_oss(2, 500, tokens=4)
    theirs, ours = (list(groups.needed(num_tokens)["window"]) for groups in (src, dst))
    ids, firsts = {"window": [5, 2, 1][: len(theirs)]}, {"window": theirs[0]}
    to = {"window": [0, 3, 4][: len(ours)]}
    plan, packer = mk.GroupsPlan(src, dst), mk.GroupsPacker(dst)
    header, staging = packed(src, ids, first_blocks=firsts)
    with pytest.raises(mk.InvalidArgument, match="'window': dst_first_blocks must be given for"):
        plan.run(ids, to)
    with pytest.raises(mk.InvalidArgument, match="'window': first_blocks must be given for .* 4 t"):
        packer.unpack(header, staging, to)

    def check():
        for token in range(num_tokens - 8, num_tokens):
            here = dst["window"].views[0].plane(1, 1)[to["window"][token // 4 - ours[0]]]
            there = src["window"].views[0].plane(1, 1)[ids["window"][token // 8 - theirs[0]]]
            assert torch.equal(here[:, token % 4], there[:, token % 8])

    assert packer.unpack(header, staging, to, first_blocks={"window": ours[0]})
    check()
    dst["window"].views[0].plane(1, 1).zero_()
    plan.run(ids, to, src_first_blocks=firsts, dst_first_blocks={"window": ours[0]})
    check()


def test_header_says_kind_and_coverage():
    groups = gpt_oss(2, 1)
    needed = groups.needed(22)
    assert needed == {"full": range(6), "window": range(3, 6)}
    firsts = {name: places.start for name, places in needed.items()}
    header, _ = packed(
        groups, {"full": range(6), "window": [3, 4, 5]}, first_blocks=firsts, chunk_bytes=1
    )
    read = mk.GroupsHeader.from_bytes(header.to_bytes())
    assert read == header
    window = read["window"]
    assert (window.kind, window.window, window.tokens_per_block) == ("window", 9, 4)
    assert (window.first_block, window.packed.num_blocks) == (3, 3)
    assert len(read.chunks) == 9
    assert [chunk.offset for chunk in read.chunks][6] == window.offset
    assert sum(chunk.num_bytes for chunk in read.chunks) == read.num_bytes


def test_some_groups_can_be_copied_alone():
    src, dst = gpt_oss(2, 1), gpt_oss(2, 500)
    before = snapshot(dst["full"].views[0])
    assert mk.GroupsPlan(src, dst).run({"window": [1]}, {"window": [2]}) == {"window": None}
    assert torch.equal(snapshot(dst["full"].views[0]), before)
    window = dst["window"].views[0]
    assert torch.equal(window.plane(1, 1)[2], src["window"].views[0].plane(1, 1)[1])
    header, staging = packed(src, {"window": [3]})
    assert mk.GroupsPacker(dst).unpack(header, staging, {"window": [0]})
    assert torch.equal(window.plane(0, 0)[0], src["window"].views[0].plane(0, 0)[3])


def test_groups_that_a_receiver_has_not_are_passed_over():
    src, dst = gpt_oss(2, 1), gpt_oss(2, 500)
    header, staging = packed(src, {"full": [1], "window": [1]})
    stage = mk.CacheGroups(dst["window"])
    assert mk.GroupsPacker(stage).unpack(header, staging, {"window": [4]})
    assert torch.equal(dst["window"].views[0].plane(1, 0)[4],
                       src["window"].views[0].plane(1, 0)[1])  # fmt: skip


@pytest.mark.parametrize("how", ["plan", "pack", "unpack", "unpack: damaged"])
def test_nothing_is_written_if_one_group_is_wrong(how):
    src, dst = gpt_oss(2, 1), gpt_oss(2, 500)
    good, bad = {"full": [1], "window": [2]}, {"full": [1], "window": [BLOCKS]}
    header, staging = packed(src, good)
    before = [snapshot(group.views[0]) for group in dst.values()], staging.clone()
    match = r"group 'window'.*\[0\] must be -1 or in \[0, 6\), got 6"
    if how == "plan":
        with pytest.raises(mk.InvalidArgument, match=match):
            mk.GroupsPlan(src, dst).run(good, bad)
    elif how == "pack":
        with pytest.raises(mk.InvalidArgument, match=r"block_ids\[0\] must be -1 or in"):
            mk.GroupsPacker(dst).pack(bad, staging)
    elif how == "unpack":
        with pytest.raises(mk.InvalidArgument, match=match):
            mk.GroupsPacker(dst).unpack(header, staging, bad)
    else:
        staging[header["window"].offset + 5] ^= 1
        before[1].copy_(staging)
        with pytest.raises(mk.ChecksumError, match="group 'window'.* record 0 must have checksum"):
            mk.GroupsPacker(dst).unpack(header, staging, good)
    assert all(
        torch.equal(snapshot(group.views[0]), was)
        for group, was in zip(dst.values(), before[0], strict=True)
    )
    assert torch.equal(staging, before[1])


def test_checksums_are_returned_for_each_group():
    src, dst = gpt_oss(2, 1), gpt_oss(2, 500)
    ids = {"full": [1, 2], "window": [2]}
    sums = mk.GroupsPlan(src, dst, checksum=True).run(ids, ids)
    for name, of_group in ids.items():
        assert torch.equal(sums[name], mk.checksum_blocks(src[name].views[0], of_group))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_longest_hit_is_the_definition(data):
    size = st.integers(1, 4)
    a = view("block token dim", 1, 1, token=(full := data.draw(size)), dim=4)
    b = view("block token dim", 1, 2, token=(window := data.draw(size)), dim=4)
    groups = mk.CacheGroups(
        mk.CacheGroup("full", a),
        mk.CacheGroup("window", b, "window", window=data.draw(st.integers(1, 9))),
        mk.CacheGroup("state", view("block dim", 1, 3, dim=4), "state",
                      tokens_per_block=data.draw(size)),
        mk.CacheGroup("encoder", view("block token dim", 1, 4, token=2, dim=4), "encoder"),
    )  # fmt: skip
    assert (groups["full"].tokens_per_block, groups["window"].tokens_per_block) == (full, window)
    flags = st.lists(st.booleans(), max_size=12)
    found = {name: data.draw(flags) for name in ("full", "window", "state")}
    tokens = min(len(found[name]) * groups[name].tokens_per_block for name in found)
    step = groups.tokens_per_hit
    expected = 0
    for n in range(0, tokens + 1, step):
        if all(found[name][i] for name in found for i in groups[name].needed(n)):
            expected = n
    assert groups.longest_hit(found) == expected


def by_definition(group, num_tokens, encoder_tokens):
    tokens = {
        "full": range(num_tokens),
        "window": range(max(0, num_tokens - (group.window or 0) + 1), num_tokens),
        "state": range(max(0, num_tokens - 1), num_tokens),
        "encoder": range(encoder_tokens),
    }[group.kind]
    return sorted({token // group.tokens_per_block for token in tokens})


@pytest.mark.parametrize("kind", ["full", "window", "state", "encoder"])
def test_needed_blocks_are_the_definition(kind):
    for window, size, num_tokens in product((1, 2, 5, 8), (1, 3, 4), range(20)):
        window = window if kind == "window" else None
        cache = view("block token dim", 1, 1, token=size, dim=2)
        group = mk.CacheGroup("g", cache, kind, window=window)
        assert [*group.needed(num_tokens, 7)] == by_definition(group, num_tokens, 7)


@pytest.mark.parametrize("run", [1, 2, 4])
@pytest.mark.parametrize(("src_ranks", "dst_ranks"), list(product((1, 2, 3), repeat=2)))
def test_tokens_of_context_parallel_ranks(src_ranks, dst_ranks, run):
    """Ranks with every nth token, or every nth run, to ranks with runs of others."""
    num_tokens, dst_run = 23, 3

    def held(rank, num_ranks, run):
        return [t for t in range(num_tokens) if t // run % num_ranks == rank]

    moved = {}
    for src_rank, dst_rank in product(range(src_ranks), range(dst_ranks)):
        src, dst = (src_rank, src_ranks, run), (dst_rank, dst_ranks, dst_run)
        src_tokens, dst_tokens = mk.shard_tokens(num_tokens, src, dst)
        for i, j in zip(src_tokens.tolist(), dst_tokens.tolist(), strict=True):
            assert held(*src)[i] == held(*dst)[j]
            assert moved.setdefault(held(*src)[i], dst_rank) == dst_rank
    assert sorted(moved) == [*range(num_tokens)]


def mla(**options):
    return view("block token dim", 1, 1, token=4, dim=4, **options)


def state(dim=4):
    return view("block dim", 1, 1, dim=dim)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mk.CacheGroup("", mla()), "name must be a str that is not empty, got ''"),
        (lambda: mk.CacheGroup("a", mla(), "ful"), "kind must be one of .*, got 'ful'"),
        (lambda: mk.CacheGroup("a", []), "CacheGroup: views must be a KVView or a list .*, got"),
        (lambda: mk.CacheGroup("a", mla(), "window"), "window must be given for kind 'window'"),
        (lambda: mk.CacheGroup("a", mla(), window=4), "window must be None for kind 'full', got 4"),
        (lambda: mk.CacheGroup("a", mla(), "window", window=0), "window must be an integer in 1"),
        (lambda: mk.CacheGroup("a", state()), "tokens_per_block must be given for views without"),
        (lambda: mk.CacheGroup("a", mla(), tokens_per_block=8), "must be 4, as of the .*, got 8"),
        (lambda: mk.CacheGroups(), "groups must be at least one, got none"),
        (lambda: mk.CacheGroups(mla()), "groups must be CacheGroup objects, got KVView"),
        (lambda: mk.CacheGroups(*[mk.CacheGroup("a", mla())] * 2), "got 'a' twice"),
        (lambda: gpt_oss(1, 1).needed(-1), "num_tokens must be an integer in 0 to .*, got -1"),
        (lambda: gpt_oss(1, 1).longest_hit({"full": []}), r"\['full', 'window'\], got \['full'\]"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), mla()), "dst must be CacheGroups"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), qwen(1, 1)), r"dst must be a mapping .*'window'\]"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), gpt_oss(2, 1)), "group 'full': .*src_heads"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), gpt_oss(1, 1), src_heads={"fully": slice(1)}),
         r"src_heads must be a mapping of some of the groups .*, got \['fully'\]"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), gpt_oss(1, 9)).run({"full": [0]}, {"window": [0]}),
         r"dst_blocks must be a mapping with the groups \['full'\], got \['window'\]"),
        (lambda: mk.GroupsPlan(gpt_oss(1, 1), gpt_oss(1, 9)).run([0], [0]),
         r"src_blocks must be a mapping of some of the groups .*, got \['list'\]"),
        (lambda: mk.GroupsPacker(mla()), "groups must be CacheGroups"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).header({}), "num_blocks must name a group, got {}"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).pack({"full": [0]}, torch.zeros(8)),
         "staging must be a 1-d uint8 tensor"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).pack({"full": [0]}, torch.zeros(8).byte()),
         "staging must have 384 bytes for 1 blocks, got 8"),
        (lambda: mk.shard_tokens(4, (2, 2, 1), (0, 1, 1)), r"src must be .*, got \(2, 2, 1\)"),
        (lambda: mk.shard_tokens(10, (0, 4, 2**62), (0, 1, 1)), "src must be .rank, number of"),
        (lambda: mk.shard_tokens(10, (0, 1, 1), (0, 2**64, 1)), "dst must be .rank, number of"),
        (lambda: gpt_oss(1, 1).needed(5, 2.5), "encoder_tokens must be an integer .*, got 2.5"),
        (lambda: gpt_oss(1, 1).needed(5, -1), "encoder_tokens must be an integer in 0 .*, got -1"),
        (lambda: gpt_oss(1, 1).longest_hit({"full": None, "window": []}),
         r"longest_hit: found\['full'\] must be a sequence of bools, one a block, got None"),
        (lambda: gpt_oss(1, 1).longest_hit({"full": [], "window": iter([True])}),
         r"longest_hit: found\['window'\] must be a sequence of bools"),
        (lambda: gpt_oss(1, 1).longest_hit({"full": [], "window": torch.tensor(True)}),
         r"longest_hit: found\['window'\] must be a sequence of bools"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).header({"full": 1}, first_blocks={"window": 3}),
         r"header: first_blocks must be of groups that are packed, got \['window'\]"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).header({"full": 1}, first_blocks={"full": -1}),
         "GroupsPacker.header: group 'full': first_blocks must be an integer in 0"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).header({"full": 1, "window": -1}),
         "GroupsPacker.header: group 'window': Packer.header: num_blocks must be an integer"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).header({"full": 1 << 24, "window": 1}),
         "header: num_blocks must be at most 16777216 of all groups, got 16777217"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).pack({"full": [0], "window": [99]}, torch.zeros(8)),
         "GroupsPacker.pack: group 'window': block_ids"),
        (lambda: mk.GroupsPacker(gpt_oss(1, 1)).pack({"full": [0]}, 0, first_blocks={"window": 0}),
         "GroupsPacker.pack: first_blocks must be of groups that are packed"),
        (lambda: mk.shard_tokens(4, (0, 2, 1), (0, 1)), r"dst must be .*, got \(0, 1\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(mk.InvalidArgument, match=message):
        make()


def test_groups_of_other_kinds_are_refused():
    window = mk.CacheGroups(mk.CacheGroup("a", mla(), "window", window=4))
    wider = mk.CacheGroups(mk.CacheGroup("a", mla(), "window", window=5))
    with pytest.raises(mk.InvalidArgument, match="'a' must have the same window .*, got 4 and 5"):
        mk.GroupsPlan(window, wider)
    header, staging = packed(window, {"a": [1]})
    with pytest.raises(mk.InvalidArgument, match="'a' must have the same window .*, got 4 and 5"):
        mk.GroupsPacker(wider).unpack(header, staging, {"a": [1]})
    states = [
        mk.CacheGroups(mk.CacheGroup("a", state(), "state", tokens_per_block=n)) for n in (8, 16)
    ]
    with pytest.raises(mk.InvalidArgument, match="the same tokens_per_block .*, got 8 and 16"):
        mk.GroupsPlan(*states)


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"name": 3},
        {"kind": "other"},
        {"kind": "full"},
        {"window": None},
        {"window": 0},
        {"window": 2.5},
        {"window": (1 << 40) + 1},
        {"tokens_per_block": 0},
        {"first_block": -1},
        {"first_block": True},
        {"first_block": 1 << 40},
        {"offset": 128},
        {"offset": False},
    ],
)
def test_forged_header_is_refused(change):
    groups = mk.CacheGroups(mk.CacheGroup("a", mla(), "window", window=4))
    header, staging = packed(groups, {"a": [1]})
    lie = mk.GroupsHeader((dataclasses.replace(header.groups[0], **change),))
    with pytest.raises(mk.InvalidArgument, match="data must describe packed groups"):
        mk.GroupsHeader.from_bytes(lie.to_bytes())
    with pytest.raises(mk.InvalidArgument, match="header must be a GroupsHeader or its bytes"):
        mk.GroupsPacker(groups).unpack(lie, staging, {"a": [1]})


def test_forged_header_of_too_many_blocks_is_refused():
    """It would have the receiver list that many chunks."""
    header, _ = packed(gpt_oss(1, 1), {"full": [1], "window": [1]})
    many = []
    for group in header.groups:
        blocks = dataclasses.replace(group.packed, num_blocks=(1 << 23) + 1, chunk_blocks=1)
        many.append(dataclasses.replace(group, packed=blocks, offset=sum(
            g.packed.num_bytes for g in many)))  # fmt: skip
    for forged in (many[:1], many):
        data = mk.GroupsHeader(tuple(forged)).to_bytes()
        if len(forged) == 1:
            assert mk.GroupsHeader.from_bytes(data).num_blocks == (1 << 23) + 1
            continue
        with pytest.raises(mk.InvalidArgument, match="data must describe packed groups"):
            mk.GroupsHeader.from_bytes(data)


def test_damaged_header_is_refused():
    header, _ = packed(gpt_oss(1, 1), {"full": [1]})
    data = header.to_bytes()
    for bad in (b"", data[:-1], data[:20] + b"x" + data[21:], b"MKPK" + data[4:], "text"):
        with pytest.raises(mk.InvalidArgument, match="^GroupsHeader: data must be"):
            mk.GroupsHeader.from_bytes(bad)
    with pytest.raises(mk.InvalidArgument, match="^PackHeader: data must begin with"):
        mk.PackHeader.from_bytes(data)
