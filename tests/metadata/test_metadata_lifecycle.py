"""Engines that are dropped, forked, or never closed: what becomes of their names."""

import gc
import os
import subprocess
import warnings

import pytest

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata import Entry
from mooncake_kernels.transfer import TransferEngine

from ..transfer.scripts import PYTHON
from .support import WAIT_S, eventually, names

PRELUDE = """
import os, signal, sys, threading
import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
url = sys.argv[1]
engine = mk.TransferEngine("a", metadata=url)
tool = mk.metadata.connect(url)
def names(): return [entry.name for entry in tool.entries()]
"""


def run_script(url: str, script: str) -> str:
    command = [*PYTHON, "-c", PRELUDE + script, url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@pytest.mark.parametrize(
    "script",
    ["", "del engine", "engine.close(); engine.close()", "sys.exit(0)",
     "tool.close(); threading.Thread(target=lambda: tool.lookup('a')).start()"],
    ids=["pending", "dropped", "closed_twice", "exit", "a_thread"],
)  # fmt: skip
def test_exiting_process_releases_its_name(url, script):
    run_script(url, script)
    assert names(url) == []


FORK = """
pid = os.fork()
if not pid:
    signal.alarm(50)
    try:
        engine.open("a")
    except InvalidArgument as error:
        assert "open: engine must be used in the process that made it" in str(error), error
    else:
        raise AssertionError("the child could open")
    {end}
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert names() == ["a"], names()
assert engine.open("a").name == "a"
engine.close()
assert names() == []
"""


@pytest.mark.parametrize(
    "end", ["os._exit(0)", "engine.close(); os._exit(0)", "del engine; sys.exit(0)", "sys.exit(0)"]
)
def test_a_forked_child_leaves_the_name_alone(url, end):
    run_script(url, FORK.format(end=end))


def test_a_forked_child_has_a_name_of_its_own(url):
    run_script(
        url,
        """
pid = os.fork()
if not pid:
    signal.alarm(50)
    with mk.TransferEngine("b", metadata=url) as child:
        assert names() == ["a", "b"]
        assert child.open("a").transport == "shm"
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert names() == ["a"], names()
""",
    )


def test_unclosed_engine_releases_its_name(url):
    engine = TransferEngine("a", metadata=url)
    assert names(url) == ["a"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    assert any("unclosed TransferEngine a" in str(w.message) for w in caught)
    assert names(url) == []


def test_refresh_thread_may_collect_the_engine(url, short_ttl, monkeypatch):
    with metadata.connect(url) as directory:
        publication = directory.publish(Entry("a", "127.0.0.1:1", instance=5), lambda holder: False)

        def collect():
            publication.close()
            return "closed", ""

        monkeypatch.setattr(publication, "_refresh", collect)
        publication._thread.join(WAIT_S)
        assert not publication._thread.is_alive()
        assert directory.entries() == []


def num_descriptors_and_threads() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_engines_leak_no_descriptors_or_threads(url):
    def life():
        with TransferEngine("a", metadata=url) as engine:
            engine.open("a")
            with pytest.raises(InvalidArgument):
                TransferEngine("a", metadata=url)
        names(url)

    life()
    before = num_descriptors_and_threads()
    for _ in range(30):
        life()

    def are_as_before():
        return all(a <= b + 2 for a, b in zip(num_descriptors_and_threads(), before, strict=True))

    # The server's threads are in this process, too: some may be about to end.
    eventually(are_as_before, f"from {before} to {num_descriptors_and_threads()}")
