"""What the calls for many values have in common: the store is called once for all of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .codes import Answer, Otherwise, check_list, code_of, fill
from .lifecycle import Lifecycle
from .replicate_config import ReplicateConfig, keeping_of


class Value(NamedTuple):
    """A value to be put."""

    name: str
    parts: Sequence[Any]


class BatchCalls(Lifecycle):
    """Over several hosts the directory is asked once, and each host, however many values it are."""

    def _put_values(
        self,
        op: str,
        codes: list[int],
        values: Mapping[int, Sequence[Value]],
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> list[int]:
        """Store values, those of some keys by their indices, and return ``codes`` with the keys'
        results filled in: 0, or the code of its first value that failed.
        """

        def put() -> list[int]:
            named = [value for some in values.values() for value in some]
            results = iter(
                self._running().objects.put_each(
                    op,
                    [value.name for value in named],
                    [value.parts for value in named],
                    keeping_of(config),
                    replace=replace,
                )
            )
            each = [[next(results) for _ in some] for some in values.values()]
            return [next(filter(None, some), 0) for some in each]

        fill(op, codes, [*values], put)
        return codes

    def _get_values(
        self,
        op: str,
        keys: Sequence[str],
        make: Callable[[memoryview], Answer],
        otherwise: Otherwise,
        name_of: Callable[[str], str] | None = None,
    ) -> list[Answer | Otherwise]:
        """What ``make`` makes of each key's value; ``otherwise`` where there is none.

        ``name_of`` returns the name of a key's value, which is the key without it.
        """
        check_list("keys", keys)
        names: dict[int, str] = {}

        def look_up(i: int) -> int:
            names[i] = keys[i] if name_of is None else name_of(keys[i])
            return 0

        found: list[Answer | int] = [code_of(op, partial(look_up, i)) for i in range(len(keys))]
        wanted = [*names.values()]
        fill(op, found, [*names], lambda: self._running().objects.get_each(op, wanted, make))
        return [otherwise if isinstance(one, int) else one for one in found]
