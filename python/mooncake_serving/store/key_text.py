"""Keys of a pool as text and in URLs: ``0x`` and 32 hexadecimal digits, the hash first."""

import re

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key

NUM_DIGITS = 32


def key_text(key: Key) -> str:
    """Format a key."""
    return f"0x{int(key[0]):016x}{int(key[1]):016x}"


def parse_key(op: str, text: str, *, argument: str = "key") -> Key:
    """Parse a key, with or without ``0x``.

    Raises:
        InvalidArgument: it is not 32 hexadecimal digits.
    """
    digits = parse_digits(op, argument, text)
    if len(digits) != NUM_DIGITS:
        raise InvalidArgument(
            f"{op}: {argument} must be {NUM_DIGITS} hexadecimal digits, got {text!r:.80}"
        )
    return int(digits[:16], 16), int(digits[16:], 16)


def parse_digits(op: str, argument: str, text: str) -> str:
    """Check the first digits of a key, maybe none; return them in lower case, without ``0x``.

    Raises:
        InvalidArgument: it is not up to 32 hexadecimal digits.
    """
    digits = text.lower().removeprefix("0x")
    if not re.fullmatch(f"[0-9a-f]{{0,{NUM_DIGITS}}}", digits):
        raise InvalidArgument(
            f"{op}: {argument} must be up to {NUM_DIGITS} hexadecimal digits, got {text!r:.80}"
        )
    return digits
