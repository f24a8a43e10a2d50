"""Random bytes in the files never raise, and never make a check fail."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.doctor import examine
from mooncake_kernels.doctor.report import as_json, table

from .machine import Disk, bridges, healthy

WORDS = st.sampled_from(
    [b"", b"\0", b"-1", b"0x", b"9" * 30, b"\xff\xfe", b"../../..", b"unlimited", b"a" * 300,
     b"1 2 3", b"[", b"0:0::", b"driver a b", b"4: ACTIVE", b"InfiniBand", b"\xd9\xa3"]
)  # fmt: skip
CONTENT = st.one_of(st.binary(max_size=600), st.lists(WORDS, max_size=6).map(b"\n".join), WORDS)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    machine = healthy(Disk(tmp_path_factory.mktemp("machine")))
    return machine, machine.root()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_file_contents_never_raise(written, data):
    machine, _ = written
    # Pairs are alike: one is enough to break.
    names = sorted(n for n in machine.files if "pci0000:" not in n or "pci0000:30" in n)
    names = [name for name in names if "/gids/" not in name or name.endswith(("/0", "/1", "/3"))]
    count = data.draw(st.integers(1, len(names)))
    start = data.draw(st.integers(0, len(names) - 1))
    chosen = (names * 2)[start : start + count]
    contents = data.draw(st.lists(CONTENT, min_size=1, max_size=40))
    check(written, {name: contents[i % len(contents)] for i, name in enumerate(chosen)})


@given(st.binary(min_size=64, max_size=4096), st.integers(0, 255))
@settings(max_examples=40, deadline=None)
def test_random_config_spaces_never_raise(written, data, first):
    machine, _ = written
    paths = [machine.links[f"/sys/bus/pci/devices/{bridge}"] for bridge in bridges(3)]
    space = data[:0x34] + bytes([first]) + data[0x35:]
    check(written, {f"{path}/config": space for path in paths})


def check(written, changes):
    machine, root = written
    for name, content in changes.items():
        root.path(name).write_bytes(content)
    findings = examine(root, machine.here)
    for name in changes:
        before = machine.files[name]
        root.path(name).write_bytes(before.encode() if isinstance(before, str) else before)
    assert not [f for f in findings if f.detail.startswith("the check failed")]
    assert table(findings) and as_json(findings)
