"""``MooncakeDistributedStore``: all of its calls."""

from .buffer_calls import BufferCalls
from .key_calls import KeyCalls
from .range_calls import RangeCalls
from .tensor_calls import TensorCalls
from .value_calls import ValueCalls


class MooncakeDistributedStore(ValueCalls, BufferCalls, RangeCalls, KeyCalls, TensorCalls):
    """Mooncake's ``MooncakeDistributedStore``: values by name, shared by processes.

    Thread-safe. Values are in the pool, and stay when this, or its process, is gone.
    """
