"""Raw peers as another user of this machine: child processes, which need root to become one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")

# Becomes the user once all that it needs has been imported: it may not be able to read this folder.
PRELUDE = """
import contextlib, encodings.idna, json, os, select, socket, sys, time
sys.path.insert(0, {root!r})
from tests.transfer.handshake import *
{imports}
arguments = json.loads({arguments!r})
os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})

def within(name):
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(20)
    end.connect("\\0mooncake_kernels/" + name.replace(":", "/"))
    return end

def over_tcp(name):
    host, port = name.rsplit(":", 1)
    return socket.create_connection((host, int(port)), 20)

def said(result):
    print(json.dumps(result), flush=True)
"""


ENGINE = """
import datetime, typing, numpy as np
from mooncake_kernels.transfer import TransferEngine
TransferEngine(secret="for what is imported late").close()
"""


def start(user: int, script: str, *, imports: str = "", **arguments: object) -> subprocess.Popen:
    """Run a script as a user; it finds ``arguments``, and answers by ``said(...)``."""
    prelude = PRELUDE.format(
        root=str(ROOT), arguments=json.dumps(arguments), user=user, imports=imports
    )
    environ = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # of a sanitizer
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def heard_from(process: subprocess.Popen) -> object:
    """What it says next."""
    return json.loads(process.stdout.readline())


def result_of(user: int, script: str, *, imports: str = "", **arguments: object) -> object:
    """The one thing that it says."""
    process = start(user, script, imports=imports, **arguments)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)
