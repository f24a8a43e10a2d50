"""Connections of redis-py that are kept, and commands that are run on them.

``redis.Redis`` takes a connection out of its pool for each command, puts it back, and keeps
statistics of that, which takes longer than what the directory of a store asks a server for. So the
pool makes connections, which log in, choose their database and find the master behind sentinels,
and is asked for another one only where those at hand do not suffice.
"""

import os
from collections.abc import Callable
from typing import Any

Word = bytes | str | int
Command = tuple[Word, ...]
Run = Callable[..., list[Any]]  # of any number of commands


class RedisConnections:
    """Connections to a server, each of which one thread uses at a time. Thread-safe.

    A forked child has none of its parent's.

    Args:
        pool: of redis-py, which makes them.
        errors: whatever redis-py raises.
    """

    def __init__(self, pool: Any, errors: tuple[type[Exception], ...]):
        from redis import ResponseError

        self._pool = pool
        self._errors = errors
        self._refusal = ResponseError
        self._idle: list[Any] = []

    def run(self, *commands: Command) -> list[Any]:
        """Send commands together, and return their replies: errors of the server among them.

        Nothing is sent twice. A connection that fails midway is not used again: what the server
        still answers is to nobody.

        Raises:
            Exception: of those that redis-py raises.
        """
        connection = self._take()
        try:
            packed = b"".join([_pack(command) for command in commands])
            connection.send_packed_command([packed], check_health=False)
            replies = [self._reply(connection) for _ in commands]
        except BaseException:
            self._drop(connection)
            raise
        self._idle.append(connection)
        return replies

    def close(self) -> None:
        """Disconnect all, those in use too. Idempotent."""
        self._pool.disconnect()
        while (connection := self._pop()) is not None:
            self._drop(connection)

    def _reply(self, connection: Any) -> Any:
        try:
            return connection.read_response()
        except self._refusal as error:
            return error

    def _take(self) -> Any:
        while (connection := self._pop()) is not None:
            if self._is_sound(connection):
                return connection
            self._drop(connection)
        return self._pool.get_connection()

    def _pop(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _is_sound(self, connection: Any) -> bool:
        """Whether it is this process's, of who is the master now, not closed by the server, and has
        nothing to read, which nobody has asked for.
        """
        if connection.pid != os.getpid() or not self._pool.owns_connection(connection):
            return False
        try:
            return connection.is_connected and not connection.can_read()
        except self._errors:
            return False

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)  # which connects it anew when one is needed


def _pack(command: Command) -> bytes:
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    strings = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n%b" % (len(words), b"".join(strings))
