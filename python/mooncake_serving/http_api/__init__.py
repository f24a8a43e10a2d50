"""What servers of the OpenAI API share: bodies with limits, answers, errors, sockets.

Needs the packages of the extra ``router``.
"""

from mooncake_kernels.extras import needed_from

with needed_from("router", __name__):
    from .bodies import Bodies, Receive, Scope
    from .errors import ErrorAnswer, invalid, overloaded
    from .reply import ClientStalled, Reply
    from .routes import HANDLERS, json_answer
    from .server import make_server, prepare, raise_file_limit

__all__ = [
    "HANDLERS",
    "Bodies",
    "ClientStalled",
    "ErrorAnswer",
    "Receive",
    "Reply",
    "Scope",
    "invalid",
    "json_answer",
    "make_server",
    "overloaded",
    "prepare",
    "raise_file_limit",
]
