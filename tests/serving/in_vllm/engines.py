"""Starts engines of vLLM: forks of one process that has imported it, which takes most of a start.

  python engines.py SOCKET

A connection to that Unix socket is an engine. Its first line, as JSON, says what it ``run``s, with
which ``arguments``, what its ``env`` has more, and the path of its ``log``; its first answer is its
process id, which is its session, too. The rest is up to what runs, see engine.py. Ends with stdin.
Runs in an environment with vLLM, not the one of the tests.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
KEPT: list[socket.socket] = []  # connected until the process has said all, and ends


def main(path: str) -> None:
    import engine

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while server in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            return
    KEPT.append(connection)
    lines, answers = connection.makefile("r"), connection.makefile("w")

    def say(answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    told = json.loads(lines.readline())
    begin(told["env"], told["log"])
    say(os.getpid())
    getattr(engine, told["run"])(told["arguments"], lines, say)


def begin(env: dict[str, str], log: str) -> None:
    """Make this process an engine's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ |= env
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


if __name__ == "__main__":
    main(sys.argv[1])
