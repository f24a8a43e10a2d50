"""Run a script in Redis: by its hash, many times in one round trip."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mooncake_kernels.metadata.redis_client import accepted
from mooncake_kernels.metadata.redis_connections import Run, pack_words


@dataclass(frozen=True)
class Script:
    """Lua that Redis knows by its hash, once it is loaded."""

    source: str

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.source.encode()).hexdigest()


def run_script(run: Run, script: Script, prefix: str, calls: list[tuple]) -> list[Any]:
    """Return a script's answers to each call's arguments, in one round trip.

    If the server does not know the script, as after a restart, it is loaded and the calls are
    retried: any script may be run twice.
    """
    commands = [command_head(script, prefix, len(call)) + pack_words(call) for call in calls]
    try:
        return accepted(run(*commands))
    except Exception as error:
        from redis.exceptions import NoScriptError

        if not isinstance(error, NoScriptError):
            raise
    return accepted(run(("SCRIPT", "LOAD", script.source), *commands))[1:]


@lru_cache
def command_head(script: Script, prefix: str, num_arguments: int) -> bytes:
    """The beginning of a command that runs a script, up to its arguments."""
    words = ("EVALSHA", script.sha, 1, prefix)
    return b"*%d\r\n%b" % (len(words) + num_arguments, pack_words(words))
