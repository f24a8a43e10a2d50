"""How many prompt tokens go into a step in addition to its decodes."""

import math
from typing import Any

from mooncake_kernels import InvalidArgument

from .arguments import is_integer, is_number, shown
from .profile import ChunkProfile


def choose_chunk_size(
    profile: ChunkProfile,
    num_decodes: int,
    *,
    prefill_per_decode: float | None = None,
    max_step_seconds: float = math.inf,
    tile: int = 128,
    max_loss: float = 0.05,
) -> int:
    """Return the size of a prompt chunk to compute together with ``num_decodes`` decodes.

    Candidates are ``n * tile - num_decodes``, so that chunk and decodes fill tiles of the matrix
    products (one token over costs a whole tile), among those steps of the profile that do not take
    longer than ``max_step_seconds``. The smallest one is chosen whose cost is within ``max_loss``
    of the lowest, since a smaller chunk delays the decodes less::

        cost(chunk) = ratio / chunk * seconds(chunk + num_decodes)        # chunks, decodes on them
                      + max(0, 1 / num_decodes - ratio / chunk) * seconds(num_decodes)   # the rest

    which is the time per decode token, with ``ratio = prefill_per_decode`` prompt tokens for each.
    If the steps' time grows with their tokens, it is lowest where the chunks just carry all
    decodes: ``ratio = chunk / num_decodes``. Without a ratio, or decodes, the cost is that of a
    prompt token, ``seconds(chunk + num_decodes) / chunk``.

    Args:
        profile: of steps; its largest size limits the choice.
        num_decodes: decodes of a step, 0 or more.
        prefill_per_decode: P:D, prompt tokens for each generated token; None: unknown.
        max_step_seconds: the time between tokens that was promised to the decodes.
        tile: tokens of a tile.
        max_loss: how much cost above the lowest is acceptable for a smaller chunk.

    Raises:
            InvalidArgument: a number is out of range, or no step is within both bounds.

    Source: SARATHI (arXiv:2308.16369), sections 4.3 and 4.4; Sarathi-Serve (OSDI'24), section 4.3.
    """
    _check("profile", profile, isinstance(profile, ChunkProfile), "a ChunkProfile")
    is_count = is_integer(num_decodes, 0)
    _check("num_decodes", num_decodes, is_count, "an integer of at least 0")
    _check("max_step_seconds", max_step_seconds, is_number(max_step_seconds), "a number")
    _check("tile", tile, is_integer(tile, 1), "an integer of at least 1")
    is_good = is_number(max_loss) and 0 <= max_loss < math.inf
    _check("max_loss", max_loss, is_good, "a number of at least 0")
    if prefill_per_decode is not None:
        is_good = is_number(prefill_per_decode) and 0 < prefill_per_decode < math.inf
        _check("prefill_per_decode", prefill_per_decode, is_good, "a positive number")

    smallest = (num_decodes // tile + 1) * tile
    _check(
        "num_decodes",
        num_decodes,
        smallest <= profile.sizes[-1],
        f"less than the last multiple of {tile} within the {profile.sizes[-1]} tokens profiled",
    )
    seconds = {
        step: profile.step_seconds(step) for step in range(smallest, profile.sizes[-1] + 1, tile)
    }
    steps = [step for step, needed in seconds.items() if needed <= max_step_seconds]
    fastest = min(seconds.values())  # not always the smallest: times are measured
    _check("max_step_seconds", max_step_seconds, bool(steps), f"{fastest} or more")

    ratio = prefill_per_decode if num_decodes else None
    costs = {
        step - num_decodes: _cost(profile, step - num_decodes, num_decodes, ratio) for step in steps
    }
    limit = min(costs.values()) * (1 + max_loss)
    return next(chunk for chunk, cost in costs.items() if cost <= limit)


def _cost(profile: ChunkProfile, chunk: int, num_decodes: int, ratio: float | None) -> float:
    together = profile.step_seconds(chunk + num_decodes)
    if ratio is None:
        return together / chunk
    decode_steps = max(0.0, 1 / num_decodes - ratio / chunk)
    return ratio / chunk * together + decode_steps * profile.step_seconds(num_decodes)


def _check(argument: str, value: Any, is_good: bool, what: str) -> None:
    if not is_good:
        raise InvalidArgument(f"choose_chunk_size: {argument} must be {what}, got {shown(value)}")
