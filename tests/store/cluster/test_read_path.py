"""The way of a read of another host's object: a reader of the code follows each function."""

import sys
from collections.abc import Callable
from pathlib import Path

import mooncake_kernels
import mooncake_serving

from .support import UNIT, value

ROOTS = tuple(
    str(Path(package.__file__).parent) for package in (mooncake_kernels, mooncake_serving)
)
OF_READS = ("/store/cluster/", "/rpc/", "/transfer/")
OF_DIRECTORIES = ("/store/directory/", "/metadata/")


def entered(call: Callable) -> list[tuple[str, str]]:
    """(file, function) of this project that a call enters in this thread, without directories."""
    steps = []

    def note(frame, event, _):
        code = frame.f_code
        file = code.co_filename
        is_ours = file.startswith(ROOTS) and not any(part in file for part in OF_DIRECTORIES)
        if event == "call" and is_ours:
            steps.append((file, getattr(code, "co_qualname", code.co_name)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def test_a_read_from_another_host_takes_few_steps(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(["first", "second"], [value(1), value(2)])
    into = bytearray(UNIT)
    assert two.cluster.get_into("first", into) == UNIT  # what is made once
    steps = entered(lambda: two.cluster.get_into("second", into))
    assert into == value(2)
    own_pool = entered(lambda: two.store.get_into("none", into))
    remote = [step for step in steps if step not in own_pool]
    assert len(remote) <= 25, remote
    files = {file for file, _ in remote}
    assert len(files) <= 10, files
    reading = {file for file in files if any(part in file for part in OF_READS)}
    assert len(reading) <= 6, reading  # the rest looks at arguments


def test_objects_of_one_holder_are_read_in_one_request(hosts):
    one, two = hosts.several(2)
    keys = range(64)
    one.cluster.put_each(keys, [value(key) for key in keys])
    arrays = [bytearray(UNIT) for _ in keys]
    steps = entered(lambda: two.cluster.get_into_each(keys, arrays))
    assert arrays == [value(key) for key in keys]
    names = [name for _, name in steps]
    for once in ("Locations.find", "Reads._read_inline", "read_into_checked"):
        assert names.count(once) == 1, once
