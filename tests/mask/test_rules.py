"""The meaning of each rule, written out by hand, and refusals."""

import pytest
import torch

import mooncake_kernels as mk

rule = mk.mask
TREE = [-1, 0, 0, 2]  # two branches; the last draft goes on with the second

# Rule, keys, and a line a query that ends at the last key; "x" is seen.
PICTURES = {
    "causal": (rule.causal(), ["xxx.", "xxxx"]),
    "full": (rule.full(), ["xxxx", "xxxx"]),
    "window alone": (rule.sliding_window(2), [".xxx", "..xx"]),
    "window": (rule.causal() & rule.sliding_window(2), [".xx..", "..xx.", "...xx"]),
    "chunked alone": (rule.chunked_local(2), ["xx...", "..xx.", "..xx.", "....x"]),
    "chunked": (rule.causal() & rule.chunked_local(2), ["xx...", "..x..", "..xx.", "....x"]),
    "sink": (rule.sink(2), ["x...", "xx..", "xx..", "xx.."]),
    "window and sink": (
        (rule.causal() & rule.sliding_window(2)) | rule.sink(1),
        ["x.....", "xx....", "xxx...", "x.xx..", "x..xx.", "x...xx"],
    ),
    "prefix": (rule.prefix_lm(3), ["xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"]),
    "documents": (rule.documents([0, 2, 3]), ["xx...", "xx...", "..x..", "...xx", "...xx"]),
    "spans": (rule.spans([(1, 3)]), ["....", ".xx.", ".xx.", "...."]),
    "images": (rule.causal() | rule.spans([(1, 3)]), ["x...", "xxx.", "xxx.", "xxxx"]),
    "items": (
        rule.items(2, [2, 5]),
        ["x.......", "xx......", "xx......", "xx.x....", "xx.xx...", "xx......", "xx....x.",
         "xx....xx"],
    ),
    "items, one bare": (rule.items(1, [3]), ["x....", "xx...", "xxx..", "x....", "x...x"]),
    "tree": (rule.tree(TREE), ["xx....", "xxx...", "xxxx..", "xxx.x.", "xxx.xx"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_every_rule_matches_its_drawing(engine, name):
    made, lines = PICTURES[name]
    batch = mk.ChunkBatch([len(lines)], [len(lines[0])], device=engine.device)
    dense = rule.rows(made, batch, engine=engine.engine).dense()[0]
    assert ["".join(".x"[int(seen)] for seen in line) for line in dense] == lines


def test_rule_parameters_may_vary_per_request(engine):
    batch = mk.ChunkBatch([1, 1, 1], [9, 9, 9], device=engine.device)
    windows = rule.causal() & rule.sliding_window([1, 5, 20])
    assert rule.rows(windows, batch, engine=engine.engine).intervals[:, 0].tolist() == [8, 4, 0]
    own = rule.per_request([rule.sink(3), rule.causal(), rule.documents([0, 6])])
    rows = rule.rows(own, batch, engine=engine.engine).intervals[:, :2].tolist()
    assert rows == [[0, 3], [0, 9], [6, 9]]


def test_chain_of_64_drafts(engine):
    """Every other draft is a dead end: runs of one key, up to the last bit."""
    parents = [-1, *(max(i - 2, 0) for i in range(1, 64))]
    batch = mk.ChunkBatch([65], [100], device=engine.device)
    rows = rule.rows(rule.tree(parents), batch, engine=engine.engine)
    seen = rows.dense()[0][-1]
    assert seen.nonzero().flatten().tolist() == [*range(37), *range(37, 100, 2)]
    assert rows.intervals[-1].tolist() == [0, 38, 39, 40]
    assert rows.tail_base.tolist() == [36]


def test_trees_of_two_sizes_share_a_tail(engine):
    batch = mk.ChunkBatch([4], [6], device=engine.device)
    both = rule.rows(rule.tree([-1, -1, -1]) | rule.tree([-1]), batch, engine=engine.engine)
    lines = ["".join(".x"[int(seen)] for seen in line) for line in both.dense()[0]]
    assert lines == ["xxx...", "xxxx..", "xxxxx.", "xxxxxx"]


def test_rule_str_is_its_source():
    made = (rule.causal() & rule.sliding_window(4096)) | rule.sink([4, 8])
    assert str(made) == "((causal() & sliding_window(4096)) | sink([4, 8]))"
    made = rule.spans([(1, 3)]) | rule.per_request([rule.tree([-1]), rule.documents([[0], [0, 4]])])
    assert str(made) == "(spans([(1, 3)]) | per_request([tree([-1]), documents([[0], [0, 4]])]))"


def test_ranges_are_accepted_as_lists():
    assert rule.documents(range(0, 30, 10)) == rule.documents([0, 10, 20])
    assert rule.documents([range(1), range(0, 8, 4)]) == rule.documents([[0], [0, 4]])


BAD = {
    "window": (lambda: rule.sliding_window(0), r"sliding_window: window must be an integer in 1"),
    "one window": (lambda: rule.sliding_window([4, 0]), r"window\[1\] must be .*, got 0"),
    "float": (lambda: rule.sink(1.5), r"sink: num_keys must be an integer .* got 1.5"),
    "chunk": (lambda: rule.chunked_local(-3), r"chunked_local: chunk must be .* got -3"),
    "overlap": (lambda: rule.documents([0, 5, 3]), "cu must ascend, got 3 after 5"),
    "no first": (lambda: rule.documents([[0, 1], [1, 5]]), r"cu\[1\] must begin with 0, got \[1"),
    "spans overlap": (lambda: rule.spans([(0, 4), (3, 5)]), r"table\[1\] must begin at or after 4"),
    "empty span": (lambda: rule.spans([[(1, 2)], [(4, 4)]]), r"table\[1\]\[0\] must not be empty"),
    "span": (lambda: rule.spans([[(1, 2)], [(4, 4, 4)]]), r"must be \(begin, end\)"),
    "delimiters": (lambda: rule.items(3, [5, 5]), r"delimiters must ascend"),
    "in prefix": (lambda: rule.items([1, 4], [[2], [3]]), r"delimiters\[1\] .* \(4\), got 3"),
    "cycle": (lambda: rule.tree([1, 2, 0]), r"got a cycle above draft 0: \[1, 2, 0\]"),
    "own parent": (lambda: rule.tree([-1, 1]), "got a cycle above draft 1"),
    "parent": (lambda: rule.tree([-1, 2]), r"parents\[1\] must be an integer in -1 to 1, got 2"),
    "65 drafts": (lambda: rule.tree([-1] * 65), "must be at most 64 drafts, got 65"),
    "no rule": (lambda: rule.per_request([rule.full(), 3]), r"rules\[1\] must be a rule, got 3"),
    "text": (lambda: rule.documents([0, "5"]), r"documents: cu\[1\] must be .* got '5'"),
    "no list": (lambda: rule.documents(7), "documents: cu must be a list, got 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_parameters_are_rejected(name):
    call, words = BAD[name]
    with pytest.raises(mk.InvalidArgument, match=words):
        call()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rule.sink([1, 2, 3]), r"one a request \(2\), got 3"),
        (rule.causal() | rule.spans([[(1, 2)]]), r"one a request \(2\), got 1"),
        (rule.per_request([rule.full()]), r"one a request \(2\), got 1"),
        (rule.tree([-1] * 5), r"at most the keys of request 1 \(4\), got 5"),
        ("causal", "must be a rule"),
    ],
)
def test_rule_that_does_not_fit_its_batch_is_rejected(made, words):
    batch = mk.ChunkBatch([1, 1], [5, 4])
    for make in (rule.rows, rule.packed):
        with pytest.raises(mk.InvalidArgument, match=words):
            make(made, batch)


@pytest.mark.parametrize(
    ("combine", "words"),
    [
        (lambda made: made & 3, "&: both sides must be rules, .* got 3"),
        (lambda made: made | None, r"\|: both sides must be rules, .* got None"),
        (lambda made: 3 & made, "&: both sides must be rules, .* got 3"),
        (lambda made: "x" | made, r"\|: both sides must be rules, .* got 'x'"),
    ],
)
def test_combining_with_a_non_rule_is_rejected(combine, words):
    for made in (rule.causal(), rule.causal() & rule.sink(1)):
        with pytest.raises(mk.InvalidArgument, match=f"^{words}$"):
            combine(made)


def test_deeply_nested_rule_is_rejected_but_a_long_one_is_not():
    made = rule.causal()
    for _ in range(100):
        made = made | rule.sink(1)
        made = rule.full() & made
    assert rule.rows(made, mk.ChunkBatch([1], [3])).intervals.tolist() == [[0, 3, 0, 0]]
    made = rule.causal()
    for _ in range(8):
        made = made & made
    with pytest.raises(mk.InvalidArgument, match="a stack of at most 8, got one of 9"):
        rule.rows(made, mk.ChunkBatch([1], [3]))


def test_rule_chain_is_limited_in_length(engine):
    made, same = rule.per_request([rule.causal()]), rule.per_request([rule.causal()])
    for begin in range(2, 400, 2):
        made = made | rule.spans([(begin, begin + 1)])
        same = same | rule.spans([(begin, begin + 1)])
    batch = mk.ChunkBatch([1], [3], device=engine.device)
    made_rows = rule.rows(made, batch, engine=engine.engine)
    assert made_rows.intervals.tolist() == [[0, 3, 0, 0]]
    assert rule.packed(made, batch, engine=engine.engine).packed.tolist() == [7]
    assert made == same and hash(made) == hash(same) and made.of(0) != made
    assert str(made).endswith("| spans([(398, 399)]))") and repr(made).endswith(")")
    for longer in (
        lambda: made & same,
        lambda: rule.sink(1) | made,
        lambda: rule.per_request([made]),
    ):
        with pytest.raises(mk.InvalidArgument, match="must nest at most 200 of & and |, got 201"):
            longer()


def test_python_and_or_not_are_rejected():
    for combine in (lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a):
        with pytest.raises(mk.InvalidArgument, match="must be combined by & and |, got the truth"):
            combine(rule.causal(), rule.sliding_window(4))


def test_unfit_rows_are_rejected_but_packed_holds_them(engine):
    three = rule.sink(1) | rule.causal() & (rule.sliding_window(1) | rule.documents([0, 3]))
    three = three | rule.prefix_lm(9) & rule.chunked_local(2) & rule.documents([0, 5])
    holes = rule.sink(1) | (rule.causal() & rule.sliding_window(1))
    holes = holes | (rule.prefix_lm(5) & rule.per_request([rule.full(), rule.spans([(3, 9)])]))
    batch = mk.ChunkBatch([1, 2], [9, 9], positions=[8, 1, 8], device=engine.device)
    middle = rule.items(1, [3]) & rule.items(5, [6])
    unfit = rule.sink(1) | (rule.items(3, [4]) & rule.sliding_window(7)) | rule.documents([0, 8])
    words = r"row 2, query 1 of request 1, sees more, or .*; mask.packed\(rule, batch\)"
    with pytest.raises(mk.InvalidArgument, match=words):
        rule.rows(rule.per_request([rule.full(), unfit]), batch, engine=engine.engine)
    for made in (three, holes, middle, unfit):
        packed = rule.packed(made, batch, engine=engine.engine)
        reference = rule.packed(made, batch, engine="reference")
        assert torch.equal(packed.packed, reference.packed)
