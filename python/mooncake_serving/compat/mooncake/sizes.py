"""Numbers of bytes as people write them in configurations: ``"16GB"``."""

import math
import re
from typing import Any

from mooncake_kernels.errors import InvalidArgument

_UNITS = {"": 0, "b": 0, "k": 1, "kb": 1, "m": 2, "mb": 2, "g": 3, "gb": 3, "t": 4, "tb": 4}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kmgt]?b?)", re.ASCII)


def parse_size(value: Any, argument: str = "size") -> int:
    """Bytes of a number, or of a text: ``"1024"``, ``"1.5gb"``, ``"512 MB"``; units are binary.

    Raises:
        InvalidArgument: it is neither; names the argument.
    """
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip().lower())):
        number, unit = found.groups()
        size = float(number) if re.search(r"[.e]", number) else int(number)
    elif isinstance(value, int | float):
        size, unit = value, ""
    else:
        size, unit = math.nan, ""
    if not math.isfinite(size):
        raise InvalidArgument(
            f'{argument} must be a number of bytes, or a text such as "16GB", got {value!r:.80}'
        )
    return int(size * 1024 ** _UNITS[unit])
