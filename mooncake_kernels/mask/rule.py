"""Rules: an operation with its parameters, and their composition."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

from ..errors import InvalidArgument, shown

Value: TypeAlias = int | tuple[int, ...]  # a number, or a table of them

# Compositions nested in each other: what walks over rules, repr() among it, is recursive.
MAX_HEIGHT = 200


class Op(IntEnum):
    """One instruction of a compiled rule. The numbers are those of csrc/mask/rule_program.h."""

    END = 0
    AND = 1
    OR = 2
    CAUSAL = 3
    FULL = 4
    SLIDING_WINDOW = 5
    CHUNKED_LOCAL = 6
    SINK = 7
    PREFIX_LM = 8
    DOCUMENTS = 9
    SPANS = 10
    ITEMS = 11
    TREE = 12


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rule: a value for all requests, or one per request."""

    values: tuple[Value, ...]
    is_per_request: bool = False

    def of(self, request: int) -> Value:
        """Return the value for one request."""
        return self.values[request if self.is_per_request else 0]


class Rule:
    """Which keys a query sees: a predicate ``sees(position, key)`` of one request.

    Rules are immutable and made by the functions of this package. They combine like their
    predicates: ``a & b`` sees what both see, ``a | b`` what either sees.

    Attributes:
        depth: stack size needed to evaluate it, the deeper of two operands first.
        height: how many compositions are nested in each other, ``MAX_HEIGHT`` at most.
        varies: whether it contains a ``per_request``.
    """

    depth: int = 1
    height: int = 0
    varies: bool = False

    def __bool__(self) -> bool:
        """Refuse ``and`` and ``or``, which would silently drop one of the rules."""
        raise InvalidArgument("mask: rules must be combined by & and |, got the truth of a rule")

    def __and__(self, other: "Rule") -> "Rule":
        """See what both see."""
        return Both(self, _as_rule("&", other))

    def __or__(self, other: "Rule") -> "Rule":
        """See what either sees."""
        return Either(self, _as_rule("|", other))

    def __rand__(self, other: Any) -> "Rule":
        """Refuse an operand that is not a rule: a rule's own ``&`` is tried first."""
        return _as_rule("&", other)

    def __ror__(self, other: Any) -> "Rule":
        """Refuse an operand that is not a rule: a rule's own ``|`` is tried first."""
        return _as_rule("|", other)

    def of(self, request: int) -> "Rule":
        """Return the rule of one request, with no choice by request left in it."""
        return self

    def check(self, num_requests: int) -> None:
        """Raise InvalidArgument unless it has a parameter for each of ``num_requests`` requests."""


def _checked_height(height: int) -> int:
    """Return the height of a composition unless it is too high."""
    if height > MAX_HEIGHT:
        raise InvalidArgument(
            f"mask: rule must nest at most {MAX_HEIGHT} of & and |, got {height}: combine parts of "
            "a long chain first, or give one rule a longer table"
        )
    return height


def _as_rule(sign: str, value: Any) -> Rule:
    if not isinstance(value, Rule):
        raise InvalidArgument(
            f"{sign}: both sides must be rules, as mask.causal() is one, got {shown(value)}"
        )
    return value


@dataclass(frozen=True)
class Leaf(Rule):
    """A rule that is not composed of others."""

    op: Op
    parameters: tuple[Parameter, ...] = ()

    def check(self, num_requests: int) -> None:
        for parameter in self.parameters:
            if parameter.is_per_request and len(parameter.values) != num_requests:
                raise InvalidArgument(
                    f"{self.op.name.lower()}: parameters must be one for all requests or one a "
                    f"request ({num_requests}), got {len(parameter.values)}"
                )

    def __str__(self) -> str:
        """Show it as it is written in Python."""
        shown = [_shown(self.op, parameter) for parameter in self.parameters]
        return f"{self.op.name.lower()}({', '.join(shown)})"


def _shown(op: Op, parameter: Parameter) -> str:
    """Show a parameter as it was given."""
    values: list[Any] = [list(v) if isinstance(v, tuple) else v for v in parameter.values]
    if op is Op.SPANS:
        values = [[*zip(flat[::2], flat[1::2], strict=True)] for flat in values]
    return str(values if parameter.is_per_request else values[0])


@dataclass(frozen=True)
class _Pair(Rule):
    left: Rule
    right: Rule

    def __post_init__(self) -> None:
        left, right = self.left.depth, self.right.depth
        object.__setattr__(self, "depth", max(left, right) + (left == right))
        height = 1 + max(self.left.height, self.right.height)
        object.__setattr__(self, "height", _checked_height(height))
        object.__setattr__(self, "varies", self.left.varies or self.right.varies)

    def of(self, request: int) -> Rule:
        left, right = self.left.of(request), self.right.of(request)
        same = left is self.left and right is self.right
        return self if same else type(self)(left, right)

    def check(self, num_requests: int) -> None:
        self.left.check(num_requests)
        self.right.check(num_requests)


class Both(_Pair):
    """``left & right``."""

    def __str__(self) -> str:
        """Show it as it is written in Python."""
        return f"({self.left} & {self.right})"


class Either(_Pair):
    """``left | right``."""

    def __str__(self) -> str:
        """Show it as it is written in Python."""
        return f"({self.left} | {self.right})"


@dataclass(frozen=True)
class PerRequest(Rule):
    """A rule for each request."""

    rules: tuple[Rule, ...]

    varies = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", max((rule.depth for rule in self.rules), default=1))
        height = 1 + max((rule.height for rule in self.rules), default=0)
        object.__setattr__(self, "height", _checked_height(height))

    def of(self, request: int) -> Rule:
        return self.rules[request].of(request)

    def check(self, num_requests: int) -> None:
        if len(self.rules) != num_requests:
            raise InvalidArgument(
                f"per_request: rules must be one a request ({num_requests}), got {len(self.rules)}"
            )
        for rule in set(self.rules):
            rule.check(num_requests)

    def __str__(self) -> str:
        """Show it as it is written in Python."""
        return f"per_request([{', '.join(map(str, self.rules))}])"
