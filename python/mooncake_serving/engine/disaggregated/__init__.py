"""Prefill and decode in separate processes; the KV cache moves between them, block by block.

if __name__ == "__main__":                   # the processes import the script that starts them
    with Cluster(WorkerOptions(model=None)) as cluster:
        for event in cluster.run([Job(prompt_tokens, SamplingParams(max_tokens=32))]):
            ...                              # tokens, as they come
        cluster.life                         # bytes and seconds of every step of a block
"""

from .cluster import Cluster
from .errors import RequestFailed, WorkerFailed
from .life import STEPS, Life, Step
from .messages import Job, NewToken, WorkerOptions

__all__ = [
    "STEPS",
    "Cluster",
    "Job",
    "Life",
    "NewToken",
    "RequestFailed",
    "Step",
    "WorkerFailed",
    "WorkerOptions",
]
