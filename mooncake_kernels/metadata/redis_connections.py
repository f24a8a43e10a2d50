"""redis-py connections, which are kept here while they are idle.

redis-py makes connections, logs in, chooses their database and finds the master behind sentinels;
it sends commands and reads their replies. Its pool is used only to make connections, because it
keeps statistics whenever one is taken out and put back. With these an ``exists`` of a cluster store
takes 1.2 times as long, a first ``get``, a ``remove`` or an ``exists`` of 64 objects 1.1 times (of
64 KiB, over tcp, both ways interleaved in one process).
"""

import os
from collections.abc import Callable
from typing import Any

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
        from redis import RedisError, ResponseError

        self._pool = pool
        self._idle: list[Any] = []
        self._refusal = ResponseError
        self._ended = (RedisError, OSError, AttributeError)  # the last if closed by another thread

    def run(self, *commands: Command) -> list[Any]:
        """Send commands together, and return their replies, including errors from the server.

        Nothing is sent twice. A connection that fails midway is not used again, and the rest of its
        replies is discarded. Nor is one to a server that no longer accepts commands.

        Raises:
            Exception: of those that redis-py raises for a connection, or for nonsense.
        """
        connection = self._take()
        try:
            replies = self._converse(connection, commands)
        except BaseException:
            self._drop(connection)
            raise
        self._idle.append(connection)
        return replies

    def detach(self, *commands: Command) -> tuple[int, list[Any]] | None:
        """Make a connection, run commands on it as ``run`` does, and give it away.

        Returns:
            Its descriptor, and the replies. None: it would be encrypted.
        """
        connection = self._pool.get_connection()
        try:
            replies = self._converse(connection, commands)
            fd = connection._sock.detach()
        finally:
            self._drop(connection)
        return None if fd is None else (fd, replies)

    def close(self) -> None:
        """Disconnect all, even those in use. Idempotent."""
        self._pool.disconnect()
        while (connection := self._pop()) is not None:
            self._drop(connection)

    def _converse(self, connection: Any, commands: tuple[Command, ...]) -> list[Any]:
        connection.send_packed_command([b"".join(map(pack, commands))])
        replies = []
        for _ in commands:
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except self._refusal as error:
                if _concerns_all(error):
                    raise
                replies.append(error)
        return replies

    def _take(self) -> Any:
        while (connection := self._pop()) is not None:
            if self._is_usable(connection):
                return connection
            self._drop(connection)
        return self._pool.get_connection()

    def _pop(self) -> Any | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _is_usable(self, connection: Any) -> bool:
        """Whether it is this process's, leads to the current master, and has nothing to read."""
        if connection.pid != os.getpid() or not self._pool.owns_connection(connection):
            return False
        try:
            return not connection.can_read()
        except self._ended:
            return False

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)  # reconnects it when one is needed


def _concerns_all(error: Exception) -> bool:
    """Whether the server refuses more than this command: it is a replica."""
    from redis import ReadOnlyError

    return isinstance(error, ReadOnlyError) or " -READONLY " in str(error)  # Redis 6, of a script


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
