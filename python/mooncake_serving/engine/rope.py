"""Rotary positions, in the half-rotation order of Hugging Face: dim i rotates with dim i + half."""

import math

import torch

from .config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the angle per position of each pair of dimensions.

    Args:
        config: gives ``rope_theta``, ``head_dim`` and the scaling.
        factors: ``[head_dim / 2]``; each frequency is divided by its factor. llama.cpp stores the
            llama3 scaling this way (``rope_freqs.weight``).

    Returns:
        ``[head_dim / 2]`` float32, radians per token, on the CPU.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if factors is not None:
        frequencies = frequencies / factors.float()
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    return frequencies


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale frequencies; llama3 as in Meta's reference: fast ones stay, slow ones are divided."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged; 0: divided
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the cosines and sines that ``rotate`` takes, once for all layers of a step.

    Args:
        positions: ``[num_tokens]``, integers.
        frequencies: ``[head_dim / 2]`` float32, on positions' device.
        dtype: of the result; angles are computed in float32.

    Returns:
        cos and sin, each ``[num_tokens, 1, head_dim]``.
    """
    angles = positions[:, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys ``[num_tokens, heads, head_dim]`` to their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
