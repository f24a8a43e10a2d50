"""Which tokens of a prompt are recomputed, layer by layer, over rearranged keys and values."""

import math
from dataclasses import dataclass

import torch

from ..arguments import as_count, refuse
from .arguments import as_number, got


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Say how many matched tokens go on through each layer; unmatched ones always do.

    The layers before ``full_layers`` are computed for all tokens, so the keys and values up to and
    including layer ``full_layers`` are fresh for all. There the deviation of the rearranged ones
    from the fresh ones is measured, and a share of the tokens, those that deviate most, go on. In
    deeper layers fewer and fewer of them do::

        share(layer) = 1 if layer < full_layers
                       else max(floor, share * decay ** (layer - full_layers))

    From SemShareKV (arXiv 2509.24832): one full layer, then the 40 % that deviate most, then
    exponentially fewer. How fast they decay in the paper is not known to us: ``decay`` and
    ``floor`` are ours, as is the rule that a layer's tokens are among those of the layer before.
    Only these have a hidden state. (A reproduction gives weights of 0.5 and 0.1 to tokens that
    deviate much and little, which would recompute tokens that have none.)

    Args:
        share: of the matched tokens, in [0, 1]: 0 none but ``last_tokens``, 1 all.
        decay: from layer to layer, in [0, 1].
        floor: the least share, in [0, 1]; no effect above ``share``.
        full_layers: how many layers are computed for all tokens, at least 1.
        last_tokens: how many tokens at the prompt's end go through all layers, at least 1.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    share: float = 0.4
    decay: float = 0.95
    floor: float = 0.1
    full_layers: int = 1
    last_tokens: int = 1

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("share", "decay", "floor"):
            as_number("Recompute", name, getattr(self, name), 0, 1)
        for name in ("full_layers", "last_tokens"):
            as_count("Recompute", name, getattr(self, name), 1)

    def share_of(self, layer_index: int) -> float:
        """Return the share of matched tokens that go through a layer."""
        depth = layer_index - self.full_layers
        if depth < 0:
            return 1.0
        return max(min(self.floor, self.share), self.share * self.decay**depth)


DEFAULT = Recompute()


def deviations(
    fresh_k: torch.Tensor, fresh_v: torch.Tensor, reused_k: torch.Tensor, reused_v: torch.Tensor
) -> torch.Tensor:
    """Measure how far each token's reused keys and values are from the fresh ones.

    Equivalent to ``norm(fresh_k[t] - reused_k[t]) + norm(fresh_v[t] - reused_v[t])``, Euclidean
    over heads and dims. (SemShareKV; CacheBlend, EuroSys 2025, section 4.3, uses the same.)

    Args:
        fresh_k: ``[num_tokens, num_kv_heads, head_dim]``, rotated to the tokens' positions.
        fresh_v: likewise, not rotated.
        reused_k: as ``fresh_k``.
        reused_v: as ``fresh_v``.

    Returns:
        float32 ``[num_tokens]``.

    Raises:
        InvalidArgument: the tensors are not of one such shape.
    """
    op, tensors = "deviations", (fresh_k, fresh_v, reused_k, reused_v)
    names = ("fresh_k", "fresh_v", "reused_k", "reused_v")
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            refuse(op, name, "[num_tokens, num_kv_heads, head_dim]", got(tensor))
        if tensor.shape != fresh_k.shape:
            refuse(op, name, f"{list(fresh_k.shape)}, as fresh_k", list(tensor.shape))
    delta_k, delta_v = fresh_k.float() - reused_k.float(), fresh_v.float() - reused_v.float()
    return delta_k.flatten(1).norm(dim=1) + delta_v.flatten(1).norm(dim=1)


def rows_by_layer(
    deviation: torch.Tensor, is_matched: torch.Tensor, num_layers: int, recompute: Recompute
) -> list[torch.Tensor]:
    """Choose the rows that go through each layer.

    Equivalent to::

        always = rows without a match and the last `last_tokens` rows
        ranked = the others, the largest deviation first, of equal ones the earlier row
        for layer in range(num_layers):
            rows[layer] = sorted(always + ranked[:ceil(share_of(layer) * len(ranked))])

    Args:
        deviation: ``[num_rows]``, of the layer ``full_layers``. A NaN ranks first.
        is_matched: bool ``[num_rows]``, whether anything is reused for a row.
        num_layers: of the model.
        recompute: how many.

    Returns:
        A tensor of int64 row indices for each layer, ascending, each a subset of the one before.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    op = "rows_by_layer"
    if not isinstance(deviation, torch.Tensor) or deviation.dim() != 1:
        refuse(op, "deviation", "[num_rows]", got(deviation))
    if got(is_matched) != f"{torch.bool} {list(deviation.shape)}":
        refuse(op, "is_matched", f"bool {list(deviation.shape)}", got(is_matched))
    num_layers = as_count(op, "num_layers", num_layers, 0)
    if not isinstance(recompute, Recompute):
        refuse(op, "recompute", "a Recompute", recompute)
    always = ~is_matched
    always[len(always) - min(recompute.last_tokens, len(always)) :] = True
    others = (~always).nonzero()[:, 0]
    keys = deviation[others].nan_to_num(nan=math.inf, posinf=math.inf)
    ranked = others[keys.argsort(descending=True, stable=True)]
    rows = []
    for layer_index in range(num_layers):
        chosen = always.clone()
        chosen[ranked[: math.ceil(recompute.share_of(layer_index) * len(ranked))]] = True
        rows.append(chosen.nonzero()[:, 0])
    return rows
