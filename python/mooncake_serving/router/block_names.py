"""Names of blocks by their tokens, whatever an engine's own hashes are."""

from collections.abc import Sequence

from mooncake_kernels.hashing import block_hashes


def block_names(
    tokens: Sequence[int], block_size: int, *, adapter: str = "", parent: int | None = None
) -> tuple[int, ...]:
    """Name the full blocks of a prompt, or of its continuation.

    Args:
        tokens: of the prompt, or those behind ``parent``.
        block_size: tokens of a block.
        adapter: name of the LoRA adapter that computes them; "": none.
        parent: name of the block before the first one; None: there is none.
    """
    names = block_hashes(
        tokens, block_size, parents=[parent], extra_keys=[adapter] if adapter else None
    )
    return tuple(names.tolist())
