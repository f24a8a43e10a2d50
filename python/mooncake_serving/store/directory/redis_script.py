"""How a script is run in Redis: by its hash, many times in one round trip."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Script:
    """Lua that Redis knows by its hash, once it was loaded."""

    source: str

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.source.encode()).hexdigest()


def run(redis: Any, script: Script, prefix: str, calls: list[tuple]) -> list[Any]:
    """Return what a script answers to each call's arguments, in one round trip.

    A server that does not know the script, as after a restart, is told, and asked again: all
    scripts may be run twice.
    """
    from redis.exceptions import NoScriptError

    if len(calls) == 1:  # a pipeline of one takes half as long again
        call = ("EVALSHA", script.sha, 1, prefix, *calls[0])
        try:
            return [redis.execute_command(*call)]
        except NoScriptError:
            redis.script_load(script.source)
            return [redis.execute_command(*call)]
    replies = _run(redis, script, prefix, calls)
    if any(isinstance(reply, NoScriptError) for reply in replies):
        redis.script_load(script.source)
        replies = _run(redis, script, prefix, calls)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def _run(redis: Any, script: Script, prefix: str, calls: list[tuple]) -> list[Any]:
    pipeline = redis.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command("EVALSHA", script.sha, 1, prefix, *call)
    return pipeline.execute(raise_on_error=False)
