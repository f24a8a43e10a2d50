"""Connections of redis-py that are kept, and commands that are run on them.

``redis.Redis`` takes a connection out of its pool for each command, puts it back, keeps statistics
of that, and reads an answer in many small steps, which all takes longer than what the directory of
a store asks a server for. So the pool makes connections, which log in, choose their database and
find the master behind sentinels, and is asked for another one only where those at hand do not
suffice. What is said over them then is said and read here.
"""

import os
from collections.abc import Callable
from typing import Any

from .redis_replies import Replies

Word = bytes | str | int
Command = tuple[Word, ...] | bytes  # its words, or packed
Run = Callable[..., list[Any]]  # of any number of commands


class RedisConnections:
    """Connections to a server, each of which one thread uses at a time. Thread-safe.

    A forked child has none of its parent's.

    Args:
        pool: of redis-py, which makes them, in a ``BoundedSocket`` each.
    """

    def __init__(self, pool: Any):
        self._pool = pool
        self._idle: list[_Conversation] = []

    def run(self, *commands: Command) -> list[Any]:
        """Send commands together, and return their replies: errors of the server among them.

        Nothing is sent twice. A connection that fails midway is not used again: what the server
        still answers is to nobody. Nor is that to a server that takes no orders (any more).

        Raises:
            Exception: of those that redis-py raises, ``OSError`` or ``ValueError``.
        """
        conversation = self._take()
        try:
            replies = conversation.run(b"".join(map(pack, commands)), len(commands))
        except BaseException:
            self._drop(conversation)
            raise
        self._idle.append(conversation)
        return replies

    def close(self) -> None:
        """Disconnect all, those in use too. Idempotent."""
        self._pool.disconnect()
        while (conversation := self._pop()) is not None:
            self._drop(conversation)

    def _take(self) -> "_Conversation":
        while (conversation := self._pop()) is not None:
            if self._is_ours(conversation.connection) and conversation.is_quiet():
                return conversation
            self._drop(conversation)
        return _Conversation(self._pool.get_connection())

    def _pop(self) -> "_Conversation | None":
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _is_ours(self, connection: Any) -> bool:
        """Whether it is this process's, and of who is the master now."""
        return connection.pid == os.getpid() and self._pool.owns_connection(connection)

    def _drop(self, conversation: "_Conversation") -> None:
        conversation.connection.disconnect()
        self._pool.release(conversation.connection)  # which connects it anew when one is needed


class _Conversation:
    """What is said over a connection, from when it was made until it is lost."""

    def __init__(self, connection: Any):
        self.connection = connection
        self._socket = connection._sock
        self._replies = Replies(self._socket.recv, _refusal)

    def run(self, packed: bytes, count: int) -> list[Any]:
        self._socket.sendall(packed)
        return self._replies.read(count)

    def is_quiet(self) -> bool:
        """Whether there is nothing to read, which nobody has asked for, nor the end."""
        return self._replies.is_empty() and not self._socket.has_input()


def _refusal(text: str) -> Exception:
    """What the server says of a command; raised if it is not of this command alone."""
    from redis import ConnectionError, ReadOnlyError
    from redis._parsers import _RESP2Parser

    error = _RESP2Parser.parse_error(text)
    if isinstance(error, ConnectionError | ReadOnlyError):
        raise error
    return error


def pack(command: Command) -> bytes:
    """A command as it is sent."""
    if isinstance(command, bytes):
        return command
    return b"*%d\r\n%b" % (len(command), pack_words(command))


def pack_words(words: tuple[Word, ...]) -> bytes:
    """Some words of a command."""
    packed = []
    for word in words:
        string = word if isinstance(word, bytes) else str(word).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(string), string))
    return b"".join(packed)
