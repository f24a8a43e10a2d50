"""``MooncakeDistributedStore``: all of its calls."""

from .key_calls import KeyCalls
from .range_calls import RangeCalls
from .session_calls import SessionCalls
from .tensor_calls import TensorCalls
from .value_calls import ValueCalls


class MooncakeDistributedStore(ValueCalls, SessionCalls, RangeCalls, KeyCalls, TensorCalls):
    """Mooncake's ``MooncakeDistributedStore``: values by name, shared by processes.

    Thread-safe. Values are in the pool, and stay when this, or its process, is gone.
    """
