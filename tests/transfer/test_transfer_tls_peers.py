"""TLS: which peers are accepted, and with which files."""

import dataclasses
import os
import re
import shutil
import ssl

import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import Tls, TransferEngine

from .certificates import HOUR
from .handshake import NO_TLS, Hello, begin, hear_hello, hear_welcome
from .secret import rejections
from .support import (
    HEADER,
    RANGE,
    UNTOUCHED,
    WAIT_S,
    WRITE,
    ZEROS,
    connect,
    ended,
    send_last,
    untouched,
)
from .tls import client_context, engines

VERIFY_FAILED = "TLS: certificate verify failed: "


def rejected(near: Tls | None, far: Tls | None) -> tuple[str, str]:
    """The causes at the initiator and at the target."""
    with engines(near, far) as (one, two):
        with pytest.raises(TransferError) as caught:
            one.open(two.name, deadline_s=WAIT_S)
        [(cause, count)] = rejections(two).items()
        assert count == 1
        return caught.value.cause, cause


@pytest.mark.parametrize(
    ("near", "far", "causes"),
    [
        ("node", "strange", (VERIFY_FAILED, "TLS: .*unknown ca")),
        ("strange", "node", (VERIFY_FAILED, "TLS: .*unknown ca")),
        ("careless", "node", ("TLS: .*unknown ca", VERIFY_FAILED)),
        ("node", "expired", (VERIFY_FAILED + "certificate has expired", "TLS: .*expired")),
        ("expired", "node", ("TLS: .*expired", VERIFY_FAILED + "certificate has expired")),
        ("node", "early", (VERIFY_FAILED + "certificate is not yet valid", "TLS: .*alert")),
        ("early", "node", ("TLS: .*alert", VERIFY_FAILED + "certificate is not yet valid")),
        ("node", "elsewhere", (VERIFY_FAILED + "IP address mismatch", "TLS: .*alert")),
        ("node", "nowhere", (VERIFY_FAILED + "IP address mismatch", "TLS: .*alert")),
        ("plain", "node", ("the peer speaks TLS only", "the peer speaks no TLS")),
        (
            "node",
            "plain",
            ("the peer speaks no TLS", "the peer speaks TLS only, this engine does not"),
        ),
    ],
)
def test_unacceptable_certificates_are_rejected(ca, other_ca, node, near, far, causes):
    kinds = {
        "node": lambda: node,
        "plain": lambda: None,
        "strange": lambda: other_ca.tls("strange"),
        "careless": lambda: Tls(**other_ca.issue("careless")),  # verifies no one
        "expired": lambda: ca.tls("expired", ends=-HOUR / 2),
        "early": lambda: ca.tls("early", starts=HOUR / 2),
        "elsewhere": lambda: ca.tls("elsewhere", host="10.1.2.3"),
        "nowhere": lambda: ca.tls("nowhere", host=None),
    }
    for cause, expected in zip(rejected(kinds[near](), kinds[far]()), causes, strict=True):
        assert re.match(expected, cause), cause


@pytest.mark.parametrize(
    ("near", "far"),
    [("node", "below"), ("below", "node"), ("easy", "elsewhere"), ("node", "careless")],
)
def test_acceptable_certificates_are_accepted(ca, node, near, far):
    kinds = {
        "node": node,
        "below": ca.intermediate("middle").tls("below"),
        "easy": dataclasses.replace(node, verify_host=False),
        "elsewhere": ca.tls("elsewhere", host="10.1.2.3"),
        "careless": Tls(**ca.issue("careless")),
    }
    with engines(kinds[near], kinds[far]) as (one, two):
        one.open(two.name).close()


def test_certificate_must_match_the_opened_name(ca, node):
    """The certificate must be for the name that was opened, not for where it leads."""
    with engines(node, ca.tls("host", host="localhost")) as (near, far):
        near.open(far.name.replace("127.0.0.1", "localhost")).close()
        with pytest.raises(TransferError, match="IP address mismatch"):
            near.open(far.name)
    with engines(node, node) as (near, far):
        with pytest.raises(TransferError, match="[Hh]ostname mismatch"):
            near.open(far.name.replace("127.0.0.1", "localhost"))


def test_tls_1_2_is_rejected(node):
    with TransferEngine(tls=dataclasses.replace(node, ca=None)) as engine:
        context = client_context(maximum_version=ssl.TLSVersion.TLSv1_2)
        with connect(engine.name) as connection, pytest.raises(ssl.SSLError):
            context.wrap_socket(connection)
        with connect(engine.name) as connection:
            with client_context().wrap_socket(connection) as secure:
                begin(secure, hello=Hello(flags=2))


def test_plaintext_to_a_tls_target_is_rejected(node):
    with TransferEngine(tls=node) as engine:
        region = engine.register(untouched(64))
        with connect(engine.name) as connection:
            write = (
                HEADER.pack(WRITE, 1, 1, 0, 64) + RANGE.pack(region.address, 64) + ZEROS + bytes(64)
            )
            connection.sendall(Hello(flags=2).packed() + write)  # it says that it is TLS
            assert hear_hello(connection).flags == 2
            assert hear_welcome(connection)[0] == NO_TLS
            send_last(connection, b"")
            assert ended(connection)
        assert (region._buffer.owner == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"certificate": "none.pem"},
            r"tls.certificate must be a PEM file of certificates, got none.pem \(No such file",
        ),
        ({"key": os.fsdecode(b"n\xff.pem")}, r"tls.key must be a PEM file .*, got n\\xff.pem \(No"),
        ({"key": "none.pem"}, "tls.key must be a PEM file of the certificate's private key, got"),
        ({"ca": "none.pem"}, "tls.ca must be a PEM file of certificates, got none.pem"),
        ({"certificate": "garbage"}, "tls.certificate must be a PEM file"),
        ({"key": "other"}, "tls.key must be .*key values mismatch"),
        ({"key": "locked"}, "tls.key must be a PEM file"),
        ({"ca": "garbage"}, "tls.ca must be a PEM file"),
        ({"certificate": 7}, "tls.certificate must be a path, got 7"),
        ({"key": ""}, "tls.key must be a path, got ''"),
        ({"ca": b"x"}, "tls.ca must be a path, got b'x'"),
        ({"verify_host": 1}, "tls.verify_host must be a bool, got 1"),
    ],
)
def test_unusable_certificate_files_are_rejected(ca, node, tmp_path, changes, message):
    (tmp_path / "garbage").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n")
    shutil.copy(ca.issue("second")["key"], tmp_path / "other")
    shutil.copy(ca.issue("third", password=b"open sesame")["key"], tmp_path / "locked")
    changes = {
        field: tmp_path / value if value in ("garbage", "other", "locked") else value
        for field, value in changes.items()
    }
    with pytest.raises(InvalidArgument, match=f"TransferEngine: {message}"):
        TransferEngine(tls=dataclasses.replace(node, **changes))
