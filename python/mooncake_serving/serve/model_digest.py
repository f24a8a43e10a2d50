"""What tells a model from others of its form: blocks of one are useless to another."""

import hashlib
from dataclasses import astuple

import torch

from mooncake_serving.engine import Llama


def model_digest(model: Llama) -> str:
    """Return 32 hexadecimal digits of a model's configuration and all of its weights.

    A weight counts by its bits, so the same file gives the same digits for any number of threads.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    weights = model.weights
    layers = [tensor for layer in weights.layers for tensor in astuple(layer)]
    for tensor in (weights.embedding, weights.head, weights.norm, weights.frequencies, *layers):
        integers = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
        total = int(tensor.contiguous().view(integers).sum(dtype=torch.int64))
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {total}".encode())
    return digest.hexdigest()[:32]
