"""A rank in a process of its own, which a test stops or kills: lines of JSON in, lines out.

  python -m tests.serving.connectors.handoff.child sender|receiver '{settings}' TRANSPORT

It says its name. Then: ``["prefill", prompt, ids, total, step]``; ``["part", prompt, ids, stop,
total]``, which offers a prompt and computes a part of it; ``["ask", prompt, rank, ids, total]``;
``["hold"]``: from now on it says "held" before it writes, and waits for ``["go"]``.
"""

import json
import sys
import threading

from mooncake_serving.connectors.handoff import Source
from tests.serving.connectors.handoff.rank import Rank, digest_of, settings_of


def say(word: str) -> None:
    print(word, flush=True)  # noqa: T201 - to the test


def main(role: str, settings: str, transport: str) -> None:
    rank = Rank(role, settings=settings_of(**json.loads(settings)), transports=[transport])
    write, may_go = rank.endpoint.write, threading.Event()

    def hold(*arguments: object) -> None:
        say("held")
        may_go.wait()
        write(*arguments)

    say(rank.name)
    for line in sys.stdin:
        match json.loads(line):
            case ["prefill", prompt, ids, total, step]:
                rank.prefill(prompt, ids, total, step=step)
            case ["part", prompt, ids, stop, total]:
                rank.sender.offer(prompt, digest_of(prompt), total)
                rank.fill(prompt, ids, 0, stop, total)
                rank.sender.progress(prompt, stop, {"0": ids})
            case ["ask", prompt, name, ids, total]:
                rank.ask(prompt, Source("P", [name]), ids, total)
            case ["hold"]:
                rank.endpoint.write = hold
            case ["go"]:
                may_go.set()
        say("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
