"""HTTP servers that strangers cannot hold up: uvicorn, with limits and deadlines that it lacks.

::

    with HttpServer(app, listen("serve", "127.0.0.1", 8080), name="example") as server:
        ...

``app`` is an ASGI app. Needs the packages of the extra ``metadata``. docs/transfer/metadata.md and
docs/store/admin.md say what the limits mean for the two servers of this project.
"""

from ..extras import needed_from

with needed_from("metadata", __name__):
    from .addresses import in_url, is_loopback, listen, listen_unix, resolve
    from .body import BodyRefused, read_body
    from .connections import Limits
    from .hosts import LOCAL_NAMES, CallerRefused, HostRule, host_name
    from .server import HttpServer, silence_uvicorn

__all__ = [
    "LOCAL_NAMES",
    "BodyRefused",
    "CallerRefused",
    "HostRule",
    "HttpServer",
    "Limits",
    "host_name",
    "in_url",
    "is_loopback",
    "listen",
    "listen_unix",
    "read_body",
    "resolve",
    "silence_uvicorn",
]
