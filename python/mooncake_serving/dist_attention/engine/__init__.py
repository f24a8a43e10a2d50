"""Engines that lend each other cache blocks (``mooncake_serving.dist_attention``).

if __name__ == "__main__":                   # the processes import the script that starts them
    with DistAttentionCluster(InstanceOptions(num_blocks=64), num_instances=2) as cluster:
        for token in cluster.run([Job(prompt_tokens, SamplingParams(max_tokens=32))]):
            ...                              # of any job, as they come
"""

from ...engine.errors import WorkerFailed
from .cluster import DistAttentionCluster
from .engine import DistAttentionEngine
from .errors import LoansLost, RequestFailed
from .messages import InstanceOptions, Job, NewToken

__all__ = [
    "InstanceOptions",
    "Job",
    "LoansLost",
    "NewToken",
    "DistAttentionCluster",
    "DistAttentionEngine",
    "RequestFailed",
    "WorkerFailed",
]
