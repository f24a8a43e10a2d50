"""Compile rules to the int32 words that csrc/mask/rule_program.h runs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .._arguments import as_instance
from .._tensors import upload
from ..errors import InvalidArgument
from .batch import ChunkBatch
from .rule import MAX_HEIGHT, Both, Either, Leaf, Op, Parameter, Rule, Value
from .rule_runs import always_fits

MAX_DEPTH = 8  # of the evaluation's stack; csrc/mask/rule_program.h


@dataclass(frozen=True)
class Program:
    """A compiled rule.

    Attributes:
        words: int32, the code.
        tails: how many of the last keys of each request are drafts of a tree.
        always_fits: whether every row is sure to fit the canonical form.
    """

    words: torch.Tensor
    tails: tuple[int, ...]
    always_fits: bool


def check_arguments(op: str, rule: Rule, batch: ChunkBatch) -> None:
    """Raise unless it is a rule and a batch."""
    as_instance(op, "rule", rule, Rule, "a rule of mooncake_kernels.mask")
    as_instance(op, "batch", batch, ChunkBatch, "a ChunkBatch")


def compile_rule(rule: Rule, kv_lens: Sequence[int], device: torch.device) -> Program:
    """Compile a rule for requests of these lengths."""
    num_requests = len(kv_lens)
    if rule.depth > MAX_DEPTH:
        raise InvalidArgument(
            f"mask: rule must need a stack of at most {MAX_DEPTH}, got one of {rule.depth}: write "
            f"it as chains of & and |, up to {MAX_HEIGHT} long"
        )
    rule.check(num_requests)
    of_request = each_own(rule, num_requests)
    tails = tail_lengths(of_request, kv_lens)
    writer = _Writer(2 * num_requests)
    for request, (own, tail) in enumerate(zip(of_request, tails, strict=True)):
        writer.words[2 * request : 2 * request + 2] = [writer.code_of(own), tail]
    words = torch.tensor(writer.words, dtype=torch.int32, device="cpu")
    fits = all(always_fits(own) for own in {id(own): own for own in of_request}.values())
    return Program(upload("mask: a rule", words, device), tails, fits)


def each_own(rule: Rule, num_requests: int) -> list[Rule]:
    """Return the rule of each request; the same object if it is the same for all."""
    if not rule.varies:
        return [rule] * num_requests
    return [rule.of(request) for request in range(num_requests)]


def tail_lengths(rules: Sequence[Rule], kv_lens: Sequence[int]) -> tuple[int, ...]:
    """Return, per request, the size of its largest tree, whose drafts must be keys of it."""
    trees = {id(rule): list(_trees(rule)) for rule in {id(rule): rule for rule in rules}.values()}
    if not any(trees.values()):
        return (0,) * len(kv_lens)
    return tuple(
        max((_num_drafts(tree, b, kv_lens[b]) for tree in trees[id(rule)]), default=0)
        for b, rule in enumerate(rules)
    )


class _Writer:
    """Appends code, parameters and tables."""

    def __init__(self, num_words: int):
        self.words: list[int] = [0] * num_words
        self._codes: dict[int, int] = {}  # by id() of rules, which the caller keeps alive
        self._places: dict[int, tuple[int, int]] = {}  # of parameters, likewise

    def code_of(self, rule: Rule) -> int:
        """Return the offset of a rule's code; write it if it is not there yet."""
        if id(rule) not in self._codes:
            self._codes[id(rule)] = self._append([*self._operations(rule), Op.END])
        return self._codes[id(rule)]

    def _operations(self, rule: Rule) -> Iterator[int]:
        if isinstance(rule, Both | Either):
            for part in sorted((rule.left, rule.right), key=lambda rule: rule.depth, reverse=True):
                yield from self._operations(part)
            yield Op.AND if isinstance(rule, Both) else Op.OR
            return
        assert isinstance(rule, Leaf)
        yield rule.op
        for parameter in rule.parameters:
            yield from self._place_of(rule.op, parameter)

    def _place_of(self, op: Op, parameter: Parameter) -> tuple[int, int]:
        if id(parameter) not in self._places:
            values = [self._number_of(op, value) for value in parameter.values]
            self._places[id(parameter)] = (self._append(values), int(parameter.is_per_request))
        return self._places[id(parameter)]

    def _number_of(self, op: Op, value: Value) -> int:
        """Return a parameter's word: a number, or the offset of a table."""
        if isinstance(value, int):
            return value
        table = list(_ancestors(value)) if op is Op.TREE else list(value)
        return self._append([len(table), *table])

    def _append(self, words: Iterable[int]) -> int:
        words = [int(word) for word in words]  # before reading the end: they may append, too
        self.words.extend(words)
        return len(self.words) - len(words)


def _ancestors(parents: Sequence[int]) -> Iterator[int]:
    """Yield two words per draft: a bit for itself and for each of its ancestors."""
    for draft in range(len(parents)):
        bits, seen = 0, draft
        while seen >= 0:
            bits, seen = bits | 1 << seen, parents[seen]
        for word in (bits & 0xFFFFFFFF, bits >> 32):
            yield word - (1 << 32) if word >> 31 else word


def _trees(rule: Rule) -> Iterator[Parameter]:
    """Yield the parents of each tree."""
    if isinstance(rule, Both | Either):
        yield from _trees(rule.left)
        yield from _trees(rule.right)
    elif isinstance(rule, Leaf) and rule.op is Op.TREE:
        yield rule.parameters[0]


def _num_drafts(tree: Parameter, request: int, kv_len: int) -> int:
    parents = tree.of(request)
    assert isinstance(parents, tuple)
    if len(parents) > kv_len:
        raise InvalidArgument(
            f"tree: parents must be at most the keys of request {request} ({kv_len}), got "
            f"{len(parents)} drafts"
        )
    return len(parents)
