"""Requests to other processes, and their answers: each is one notification of a transfer engine.

A protocol is a set of messages, which ``Codec`` makes bytes and checks when they arrive.
``RpcClient`` sends requests, and hands answers to those who wait; ``Receiver`` is the thread that
takes whatever arrives. How a request is carried out is its protocol's own business: on how many
threads, and what may be waited for there.
"""

from .client import Call, Descriptors, Receiver, RpcClient
from .messages import MAX_REASON, Codec, Message, Number, Reason, Refused
from .peers import Peers

__all__ = [
    "MAX_REASON",
    "Call",
    "RpcClient",
    "Codec",
    "Descriptors",
    "Message",
    "Number",
    "Peers",
    "Reason",
    "Receiver",
    "Refused",
]
