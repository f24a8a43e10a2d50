"""Chunked pipeline parallelism: an engine whose layers are divided among processes.

Each process, a stage, has contiguous layers. Chunks of prompts are on their way through the stages
at once: while a later stage computes one chunk, an earlier one computes the next. Activations move
by a ``TransferEngine``.
"""

from .engine import PipelinedEngine
from .group import StageGroup
from .messages import GroupOptions

__all__ = ["GroupOptions", "PipelinedEngine", "StageGroup"]
