"""What tells a model from others of its form: blocks of one are useless to another."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import torch

from mooncake_serving.engine import Llama


def model_digest(model: Llama) -> str:
    """Return 32 hexadecimal digits of a model's configuration and all of its weights.

    A weight counts by its bits and its place.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    weights = model.weights
    layers = [getattr(layer, one.name) for layer in weights.layers for one in fields(layer)]
    tensors = (weights.embedding, weights.head, weights.norm, weights.frequencies, *layers)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for one in pool.map(_digest, tensors):
            digest.update(one)
    return digest.hexdigest()[:32]


def _digest(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    data: Any = tensor.contiguous().cpu().view(torch.uint8).numpy()
    digest.update(data)
    return digest.digest()
