"""Which processes take part in a store, and which pools have which objects: the directory.

::

    with directory.connect("redis://10.0.0.1:6379/0", cluster="llama-70b") as servers:
        print(servers.members())

docs/store/directory.md says what is guaranteed, and how the data is laid out in Redis.
"""

from .base import MAX_KEYS, Claim, Directory, Holders, Member, NotAMember, Published
from .embedded import EmbeddedDirectory
from .redis import RedisDirectory

__all__ = [
    "MAX_KEYS",
    "Claim",
    "Directory",
    "EmbeddedDirectory",
    "Holders",
    "Member",
    "NotAMember",
    "Published",
    "RedisDirectory",
    "connect",
]


def connect(url: str, cluster: str = "mooncake") -> Directory:
    """Make a client of the directory at a URL. It connects on first use.

    Args:
        url: of Redis: ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://``.
        cluster: names the group of pools; groups on one server do not see each other.

    Raises:
        InvalidArgument: the URL is none of these, or the name is not allowed.
        Unavailable: redis-py is not installed.
    """
    return RedisDirectory(url, cluster)
