"""Engines that lend each other cache blocks (``mooncake_serving.pooling``).

if __name__ == "__main__":                   # the processes import the script that starts them
    with PooledCluster(InstanceOptions(num_blocks=64), num_instances=2) as cluster:
        for event in cluster.run([Job(prompt_tokens, SamplingParams(max_tokens=32))]):
            ...                              # tokens and failures, as they come
"""

from ..disaggregated.messages import Failed, Job, NewToken
from .cluster import PooledCluster
from .engine import PooledEngine
from .errors import LoansLost
from .messages import InstanceOptions

__all__ = [
    "Failed",
    "InstanceOptions",
    "Job",
    "LoansLost",
    "NewToken",
    "PooledCluster",
    "PooledEngine",
]
