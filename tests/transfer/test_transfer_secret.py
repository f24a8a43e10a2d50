"""The secret: which engines have it, where it comes from, and that it is never printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_kernels import config
from mooncake_kernels.__main__ import main
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import Tls, TransferEngine

from ..cxx import without_sanitizer
from .handshake import NOTHING
from .secret import (
    ANOTHER,
    NO_TLS,
    NONE,
    OURS,
    THEIRS,
    TLS_ONLY,
    UNWANTED,
    UNWANTED_TLS,
    cause_of_opening,
    initiator,
    rejections,
)
from .support import WAIT_S

mismatches = pytest.mark.parametrize(
    ("near", "far", "cause_near", "cause_far"),
    [
        (THEIRS, OURS, ANOTHER, ANOTHER),
        (None, OURS, UNWANTED, NONE),
        (OURS, None, NONE, UNWANTED),
    ],
)


@mismatches
@pytest.mark.parametrize("secret_only", [False, True])
def test_secret_mismatch_is_explained_on_both_sides(near, far, cause_near, cause_far, secret_only):
    if near and not far and not secret_only:
        cause_far = UNWANTED_TLS  # it begins with TLS
    alone = {"secret_only": secret_only}
    with (
        initiator(near, **(alone if near else {})) as engine,
        TransferEngine(secret=far, **(alone if far else {})) as other,
    ):
        assert cause_of_opening(engine, other.name) == cause_near
        assert rejections(other) == {cause_far: 1}
        assert engine.rejections() == {}


def test_tls_mismatch_is_explained_on_both_sides():
    with initiator(OURS) as alone, initiator(OURS, secret_only=False) as encrypted:
        assert cause_of_opening(alone, encrypted.name) == TLS_ONLY
        assert rejections(encrypted) == {"the peer speaks no TLS": 1}
        assert cause_of_opening(encrypted, alone.name) == NO_TLS
        assert rejections(alone) == {UNWANTED_TLS: 1}


@pytest.mark.parametrize("options", [{}, {"secret": OURS, "tls": True}])
def test_secret_only_needs_a_secret_and_no_certificates(options, tmp_path):
    files = Tls(tmp_path / "certificate", tmp_path / "key")
    options = {**options, "tls": files} if "tls" in options else options
    with pytest.raises(InvalidArgument, match="secret_only must be False without a secret and"):
        TransferEngine(secret_only=True, **options)
    with pytest.raises(InvalidArgument, match="secret_only must be a bool, got 1"):
        TransferEngine(secret=OURS, secret_only=1)


def test_secret_may_be_a_string(guarded):
    with initiator(OURS.decode()) as engine, engine.open(guarded[0].name) as peer:
        assert peer.transport == "tcp"


def test_secret_is_read_from_the_settings(guarded, tmp_path):
    (tmp_path / "secret").write_bytes(OURS + b"\n")
    for changes in ({"secret": OURS.decode()}, {"secret_file": str(tmp_path / "secret")}):
        with config.override(secret_only=1, **changes), initiator(None) as engine:
            engine.open(guarded[0].name).close()
            with initiator(THEIRS) as other:  # an argument is before the settings
                assert cause_of_opening(other, guarded[0].name) == ANOTHER
    with config.override(secret=OURS.decode(), secret_file="x"):
        with pytest.raises(InvalidArgument, match=r"_SECRET and .*_SECRET_FILE must not both"):
            TransferEngine()
    (tmp_path / "secret").write_bytes(b"\n")
    for file, why in (("none", "No such file"), ("secret", "which is empty")):
        with config.override(secret_file=str(tmp_path / file)):
            with pytest.raises(InvalidArgument, match=f"_SECRET_FILE must be .* got .*{why}"):
                TransferEngine()


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (b"2short", "secret must be 16 to 4096 bytes, got 6"),
        ("", "secret must be 16 to 4096 bytes, got 0"),
        (b"x" * 4097, "secret must be 16 to 4096 bytes, got 4097"),
        (17, "secret must be bytes or str, got int"),
        (bytearray(32), "secret must be bytes or str, got bytearray"),
        ("2short\ud800", "secret must be text that UTF-8 can hold"),
    ],
)
def test_invalid_secrets_are_rejected(secret, message):
    with pytest.raises(InvalidArgument, match=f"TransferEngine: {message}") as caught:
        TransferEngine(secret=secret)
    assert "2short" not in str(caught.value)


def test_the_secret_is_not_printed(capsys, caplog, guarded):
    text = OURS.decode()
    with config.override(secret=text, secret_only=1), caplog.at_level(0):
        with initiator(None) as engine, engine.open(guarded[0].name) as peer:
            said = [repr(config.current()), repr(engine), repr(peer), repr(vars(engine))]
        assert main(["config"]) == 0
        with initiator(THEIRS) as engine, pytest.raises(TransferError) as caught:
            engine.open(guarded[0].name)
    said += [repr(caught.value), caplog.text, *capsys.readouterr()]
    assert all(text not in line and THEIRS.decode() not in line for line in said)
    assert "MOONCAKE_KERNELS_SECRET_FILE" in said[-2]


def test_secret_command_generates_a_secret(capsys):
    made = set()
    for _ in range(2):
        assert main(["secret"]) == 0
        made.add(capsys.readouterr().out)
    assert len(made) == 2 and all(re.fullmatch(r"[0-9a-f]{64}\n", line) for line in made)


@pytest.mark.parametrize("near", [NOTHING, OURS[:-1], OURS + b"\0", OURS.upper()])
def test_nearly_correct_secret_is_rejected(guarded, near):
    with initiator(near) as engine:
        assert cause_of_opening(engine, guarded[0].name) == ANOTHER


WITHOUT_OPENSSL = f"""
import sys, types

package = types.ModuleType("mooncake_kernels")  # without torch, which may want OpenSSL itself
package.__path__ = [{str(Path(config.__file__).parent)!r}]
sys.modules["mooncake_kernels"] = package
from mooncake_kernels import _host

def engine(secret=None, tls=None):
    return _host.TransferEngine("", "127.0.0.1:0", local=False, shm=False, cuda_ipc=False, tcp=True,
        file=False, nics=[], near_nodes=[], near_gpus=[], nics_required=False,
        packets=(-1, 0, 0), num_lanes=1, max_connections=8, spin_us=0, secret=secret,
        secret_only=False, tls=tls, local_users=[], reached_at=[])

one, two = engine(), engine()
one.open(two.name, two.name, 0, {WAIT_S})
for arguments in ({{"secret": b"x" * 32}}, {{"tls": (b"", b"", b"", True)}}):
    try:
        engine(**arguments)
    except RuntimeError as error:
        print(error)
"""


def test_missing_openssl_is_reported(tmp_path):
    """Empty libraries in its place: an engine works, and one with a secret says what is missing."""
    for name in ("libcrypto.so.3", "libssl.so.3"):
        command = ["g++", "-x", "c++", "/dev/null", "-shared", "-o", tmp_path / name]
        subprocess.run(command, check=True, env=without_sanitizer())
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENSSL],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for what, line in zip(("a secret", "TLS"), run.stdout.splitlines(), strict=True):
        assert line.startswith(f"TransferEngine: {what} needs OpenSSL 3: ")


@mismatches
def test_engines_of_one_process_need_the_secret(near, far, cause_near, cause_far):
    with TransferEngine(secret=near) as engine, TransferEngine(secret=far) as other:
        assert cause_of_opening(engine, other.name) == cause_near
        assert rejections(other) == {cause_far: 1}
    with TransferEngine(secret=OURS) as engine, TransferEngine(secret=OURS) as other:
        with engine.open(other.name) as peer:
            assert peer.transport == "local"
