"""Options that are numbers."""

import argparse
import math
from collections.abc import Callable


def number(
    kind: type[int] | type[float], least: float, most: float = math.inf
) -> Callable[[str], float]:
    """Make the parser of an option: a finite number in a range."""
    what = "an integer" if kind is int else "a number"
    wanted = f"{what} from {least:g} " + ("on" if most == math.inf else f"to {most:g}")

    def parse(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse
