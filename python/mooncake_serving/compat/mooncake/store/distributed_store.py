"""``MooncakeDistributedStore``: all of its calls."""

from .key_calls import KeyCalls
from .range_calls import RangeCalls
from .replica_calls import ReplicaCalls
from .segment_calls import SegmentCalls
from .session_calls import SessionCalls
from .tensor_device_calls import TensorDeviceCalls
from .tensor_file_calls import TensorFileCalls
from .tensor_parallel_calls import TensorParallelCalls
from .value_calls import ValueCalls


class MooncakeDistributedStore(
    ValueCalls,
    SessionCalls,
    RangeCalls,
    KeyCalls,
    ReplicaCalls,
    SegmentCalls,
    TensorParallelCalls,
    TensorFileCalls,
    TensorDeviceCalls,
):
    """Mooncake's ``MooncakeDistributedStore``: values by name, shared by processes.

    Thread-safe. Values are in the pool, and stay there when this object, or its process, is gone.
    """
