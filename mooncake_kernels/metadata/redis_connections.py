"""Pooled redis-py connections, with a fast path for running commands on them.

``redis.Redis`` takes a connection out of its pool for each command, puts it back, keeps statistics
about that, and reads an answer in many small steps. All of this takes longer than the requests of a
store's directory themselves. So the pool only makes connections, which log in, choose their
database and find the master behind sentinels, and is asked for another one only when no idle one is
left. Commands are sent, and replies read, here.
"""

import os
from collections.abc import Callable
from typing import Any

from .redis_replies import Replies

Word = bytes | str | int
Command = tuple[Word, ...] | bytes  # its words, or the packed form
Run = Callable[..., list[Any]]  # of any number of commands


class RedisConnections:
    """Connections to a server, each used by one thread at a time. Thread-safe.

    A forked child has none of its parent's.

    Args:
        pool: of redis-py, which makes them, each in a ``BoundedSocket``.
    """

    def __init__(self, pool: Any):
        self._pool = pool
        self._idle: list[_Conversation] = []

    def run(self, *commands: Command) -> list[Any]:
        """Send commands together, and return their replies, including errors from the server.

        Nothing is sent twice. A connection that fails midway is not used again, and the rest of its
        replies is discarded. Nor is one to a server that no longer accepts commands.

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

    def detach(self, *commands: Command) -> tuple[int, list[Any]] | None:
        """Make a connection, run commands on it as ``run`` does, and give it away.

        Returns:
            Its descriptor, and the replies. None: it would be encrypted.
        """
        conversation = _Conversation(self._pool.get_connection())
        try:
            replies = conversation.run(b"".join(map(pack, commands)), len(commands))
            fd = conversation.detach()
        finally:
            self._drop(conversation)
        return None if fd is None else (fd, replies)

    def close(self) -> None:
        """Disconnect all, even those in use. Idempotent."""
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
        """Whether it belongs to this process, and leads to the current master."""
        return connection.pid == os.getpid() and self._pool.owns_connection(connection)

    def _drop(self, conversation: "_Conversation") -> None:
        conversation.connection.disconnect()
        self._pool.release(conversation.connection)  # reconnects it when one is needed


class _Conversation:
    """The traffic of a connection, from its creation until it is lost."""

    def __init__(self, connection: Any):
        self.connection = connection
        self._socket = connection._sock
        self._replies = Replies(self._socket.recv, _refusal)

    def run(self, packed: bytes, count: int) -> list[Any]:
        self._socket.sendall(packed)
        return self._replies.read(count)

    def detach(self) -> int | None:
        return self._socket.detach()

    def is_quiet(self) -> bool:
        """Whether there is no unsolicited input, nor the end of the connection."""
        return self._replies.is_empty() and not self._socket.has_input()


def _refusal(text: str) -> Exception:
    """The server's error for a command; raised if it concerns more than this command."""
    from redis import ConnectionError, ReadOnlyError
    from redis._parsers import _RESP2Parser

    error = _RESP2Parser.parse_error(text)
    in_a_script = " -READONLY " in text  # as Redis 6 says it
    if in_a_script or isinstance(error, ConnectionError | ReadOnlyError):
        raise error
    return error


def pack(command: Command) -> bytes:
    """A command in wire form."""
    if isinstance(command, bytes):
        return command
    return b"*%d\r\n%b" % (len(command), pack_words(command))


def pack_words(words: tuple[Word, ...]) -> bytes:
    """Some words of a command in wire form."""
    packed = []
    for word in words:
        string = word if isinstance(word, bytes) else str(word).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(string), string))
    return b"".join(packed)
