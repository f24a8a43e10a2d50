"""The rules: what each sees, as a predicate on the positions of a query and a key."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from .._arguments import as_instance, as_integer
from ..errors import InvalidArgument, shown
from .rule import Leaf, Op, Parameter, PerRequest, Rule
from .rule_arguments import as_numbers, as_table, as_tables, is_flat, is_pair

Ints: TypeAlias = int | Sequence[int]  # one for all requests, or one per request
Table: TypeAlias = Sequence[Any]  # one for all requests, or one per request: see each rule


def causal() -> Rule:
    """See the query's own position and earlier ones: ``key <= position``.

    A chunk's queries are the last of their request unless the batch says otherwise, so this is the
    mask aligned to the bottom right (SARATHI, section 4.2).
    """
    return Leaf(Op.CAUSAL)


def full() -> Rule:
    """See every key."""
    return Leaf(Op.FULL)


def sliding_window(window: Ints) -> Rule:
    """See nothing that is ``window`` or more behind: ``key > position - window``.

    It bounds only the past. ``causal() & sliding_window(W)`` sees W keys, including the query's
    own.

    Args:
        window: keys, at least 1; one for all requests, or one per request.
    """
    return Leaf(Op.SLIDING_WINDOW, (as_numbers("sliding_window", "window", window, minimum=1),))


def chunked_local(chunk: Ints) -> Rule:
    """See the keys of the query's own chunk: ``key // chunk == position // chunk``.

    Chunks are counted from the request's first key (Llama 4: ``causal() & chunked_local(8192)``).

    Args:
        chunk: keys, at least 1; one for all requests, or one per request.
    """
    return Leaf(Op.CHUNKED_LOCAL, (as_numbers("chunked_local", "chunk", chunk, minimum=1),))


def sink(num_keys: Ints) -> Rule:
    """See the request's first keys, if not later: ``key < num_keys and key <= position``.

    So ``(causal() & sliding_window(4096)) | sink(4)`` is causal (StreamingLLM, section 3). These
    are tokens; the sinks of gpt-oss are logits, which ``docs/kernels/masks.md`` merges.

    Args:
        num_keys: at least 0; one for all requests, or one per request.
    """
    return Leaf(Op.SINK, (as_numbers("sink", "num_keys", num_keys, minimum=0),))


def prefix_lm(prefix: Ints) -> Rule:
    """See the whole prefix and what came before: ``key < prefix or key <= position``.

    Args:
        prefix: keys, at least 0; one for all requests, or one per request.
    """
    return Leaf(Op.PREFIX_LM, (as_numbers("prefix_lm", "prefix", prefix, minimum=0),))


def documents(cu: Table) -> Rule:
    """See the keys of the query's own document: ``document(key) == document(position)``.

    Document i of a request is ``[cu[i], cu[i + 1])``; positions from ``cu[-1]`` on are one more.
    By itself the rule also sees later keys of the document.

    Args:
        cu: where documents begin, ascending, the first of them 0: a list of ints for all requests,
            or such a list per request.
    """
    tables = as_tables(cu, is_one=is_flat)
    values = []
    for name, table in tables.named("documents: cu"):
        begins = as_table(name, table)
        if not begins or begins[0] != 0:
            raise InvalidArgument(f"{name} must begin with 0, got {list(begins)}")
        for before, begin in pairwise(begins):
            if begin <= before:
                raise InvalidArgument(f"{name} must ascend, got {begin} after {before}")
        values.append(begins)
    return Leaf(Op.DOCUMENTS, (Parameter(tuple(values), tables.is_per_request),))


def spans(table: Table) -> Rule:
    """See all of the query's own span: ``begin <= position < end and begin <= key < end``.

    Queries outside the spans see nothing by this rule. ``causal() | spans(table)`` lets the
    tokens of an image see each other both ways (Gemma 3, PaliGemma). A span may extend past the
    keys that exist so far.

    Args:
        table: half-open spans ``(begin, end)``, ordered by position, none empty: a list of pairs
            for all requests, or such a list per request.
    """
    tables = as_tables(table, is_one=lambda spans: all(map(is_pair, spans)))
    values = []
    for name, pairs in tables.named("spans: table"):
        flat: list[int] = []
        for index, pair in enumerate(pairs):
            if not is_pair(pair):
                raise InvalidArgument(f"{name}[{index}] must be (begin, end), got {shown(pair)}")
            begin, end = as_table(f"{name}[{index}]", pair)
            if end <= begin:
                raise InvalidArgument(f"{name}[{index}] must not be empty, got ({begin}, {end})")
            if flat and begin < flat[-1]:
                raise InvalidArgument(
                    f"{name}[{index}] must begin at or after {flat[-1]}, where the one before it "
                    f"ends, got ({begin}, {end})"
                )
            flat += [begin, end]
        values.append(tuple(flat))
    return Leaf(Op.SPANS, (Parameter(tuple(values), tables.is_per_request),))


def items(prefix: Ints, delimiters: Table) -> Rule:
    """Score several items after one prefix, blind to each other (FlashInfer's multi-item mask).

    A query in the prefix is causal. After it::

        key < prefix or last_delimiter(position) < key <= position

    where ``last_delimiter`` is the last one at or before the position, ``prefix - 1`` if there is
    none. So an item's token sees the prefix and its own item up to itself, and a delimiter only the
    prefix.

    Args:
        prefix: keys, at least 0; one for all requests, or one per request.
        delimiters: positions of the delimiters, ascending, none of them in the prefix: a list of
            ints for all requests, or such a list per request.
    """
    prefixes = as_numbers("items", "prefix", prefix, minimum=0)
    tables = as_tables(delimiters, is_one=is_flat)
    if prefixes.is_per_request and tables.is_per_request:
        if len(prefixes.values) != len(tables.entries):
            raise InvalidArgument(
                f"items: delimiters must be as many as prefix ({len(prefixes.values)}), got "
                f"{len(tables.entries)}"
            )
        least = [_number(value) for value in prefixes.values]
    else:  # each list may apply to each prefix
        least = [max(map(_number, prefixes.values), default=0)] * len(tables.entries)
    values = []
    for end, (name, table) in zip(least, tables.named("items: delimiters"), strict=True):
        found = as_table(name, table)
        if any(later <= earlier for earlier, later in pairwise(found)):
            raise InvalidArgument(f"{name} must ascend, got {list(found)}")
        if found and found[0] < end:
            raise InvalidArgument(
                f"{name} must be at or after the prefix's end ({end}), got {found[0]}"
            )
        values.append(found)
    return Leaf(Op.ITEMS, (prefixes, Parameter(tuple(values), tables.is_per_request)))


def tree(parents: Table) -> Rule:
    """See a query's ancestors in a tree of drafts at the request's end (speculative decoding).

    The last ``D = len(parents)`` keys are drafts; draft j is at ``kv_len - D + j``. A query before
    them is causal. Draft j sees every key before the drafts, itself, and its ancestors
    ``parents[j]``, ``parents[parents[j]]`` and so on.

    Args:
        parents: the parent of each draft, -1 for one that follows the keys before the drafts; at
            most 64, in any order without a cycle: a list for all requests, or one per request.
    """
    tables = as_tables(parents, is_one=is_flat)
    values = tuple(_as_parents(name, table) for name, table in tables.named("tree: parents"))
    return Leaf(Op.TREE, (Parameter(values, tables.is_per_request),))


def per_request(rules: Sequence[Rule]) -> Rule:
    """See by each request's own rule: ``rules[b]`` in request b."""
    as_instance("per_request", "rules", rules, list | tuple, "a list of rules, one a request")
    for index, rule in enumerate(rules):
        as_instance("per_request", f"rules[{index}]", rule, Rule, "a rule")
    return PerRequest(tuple(rules))


MAX_DRAFTS = 64


def _as_parents(name: str, table: Sequence[int]) -> tuple[int, ...]:
    if len(table) > MAX_DRAFTS:
        raise InvalidArgument(f"{name} must be at most {MAX_DRAFTS} drafts, got {len(table)}")
    parents = tuple(
        as_integer("tree", f"{name.removeprefix('tree: ')}[{j}]", parent, -1, len(table) - 1)
        for j, parent in enumerate(table)
    )
    for draft, parent in enumerate(parents):
        for _ in parents:
            parent = parents[parent] if parent >= 0 else -1
        if parent >= 0:
            raise InvalidArgument(
                f"{name} must be a tree, got a cycle above draft {draft}: {list(parents)}"
            )
    return parents


def _number(value: Any) -> int:
    return int(value)
