"""Shared by the tests of TLS: engines and raw peers that speak it."""

import contextlib
import ssl

from mooncake_kernels.transfer import Tls, TransferEngine

from .support import raw_server

SECRET = b"what all of us know, and others do not"


@contextlib.contextmanager
def engines(near: Tls | None, far: Tls | None, **options):
    with TransferEngine(transports=["tcp"], tls=near, **options) as one:
        with TransferEngine(tls=far, **options) as two:
            yield one, two


def client_context(**options) -> ssl.SSLContext:
    """A TLS client that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    for name, value in options.items():
        setattr(context, name, value)
    return context


def server_context(files: dict) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certificate"], files["key"])
    context.num_tickets = 0
    return context


@contextlib.contextmanager
def tls_server(files: dict, behave):
    """A raw server that speaks TLS."""
    context = server_context(files)

    def shake_hands(connection):
        with context.wrap_socket(connection, server_side=True) as secure:
            behave(secure)

    with raw_server(shake_hands) as name:
        yield name
