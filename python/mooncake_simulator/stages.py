"""Chunked pipeline parallelism (CPP): the nodes of a group, each with its share of the layers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """Loading of reused KV to the GPUs of all stages, in seconds after its prompt has entered.

    Attributes:
        first_s: until there is enough of it to begin computing.
        all_s: until all of it is there; no chunk is done before that.
    """

    first_s: float = 0.0
    all_s: float = 0.0


NO_LOAD = Load()


def pass_stages(
    free_s: Sequence[float], enter_s: float, chunks_s: Sequence[float], load: Load = NO_LOAD
) -> list[float]:
    """Return when each stage is done with a prompt, given when it is done with all earlier ones.

    Chunk c of X equal stages follows itself on the stage before, and its predecessor on its own
    stage, so that nothing is overtaken::

        end[c][s] = max(end[c][s - 1], end[c - 1][s]) + chunks_s[c] / X     end[-1] = free_s

    After an idle pipeline this is ``enter_s + sum(chunks_s) / X + (X - 1) * max(chunks_s) / X``.
    The transfer between stages, a chunk's activations, takes no time: for LLaMA3-70B these are 16
    KiB a token, a twentieth of its KV, sent while the next chunk is computed.

    Args:
        free_s: when each stage is done with the prompts before.
        enter_s: when this one may enter the first stage.
        chunks_s: of each chunk on all stages together.
        load: of the KV that its first chunk attends to.
    """
    ends_s = list(free_s)
    begin_s, loaded_s = enter_s + load.first_s, enter_s + load.all_s
    for chunk_s in chunks_s:
        stage_s, end_s = chunk_s / len(ends_s), begin_s
        for stage, stage_free_s in enumerate(ends_s):
            end_s = ends_s[stage] = max(max(end_s, stage_free_s) + stage_s, loaded_s)
    return ends_s
