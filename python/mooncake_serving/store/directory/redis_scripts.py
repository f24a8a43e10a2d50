"""The operations of a directory in Redis: scripts in Lua, each of which is atomic.

Names begin with the cluster's in braces, which keeps them all on one node of a Redis Cluster. After
it follows:

    o<key>    string: numbers of the pools that have the object, each followed by a space
    c<key>    string, with a time to live: seat of the member that has a claim to it
    r<key>    string, with a time to live: numbers of the pools that had it when it was removed
    l<key>    string, with a time to live: numbers of the pools that are giving it up
    p<pool>   set: keys of the objects of the pool with this number
    alive     sorted set: seats, by when they expire, in milliseconds of the server's clock
    served    sorted set: numbers of pools, by when the last seat of each expires
    members   hash: from a member's name to its seat, the server that it joined, and its entry
    pools     hash: from a pool's number to its name
    names     hash: from a pool's name to its number
    numbers   string: the last number that was given

A seat is "<member> <pool> <name of the pool>", with numbers, and pool 0 for none. Members and pools
get new numbers whenever they come to life, so they do not inherit anything from their predecessors.
Entries of dead pools stay until they are swept.

Keys come as one string, 16 bytes each: reading thousands of arguments would take longer than the
work itself. The values of all keys are read by one command, and written by one. Most keys of a
prompt have the same value: it is decoded once.

A server that is out of memory refuses a script whose first write command may need memory: scripts
that free something begin with a different command.

The files in lua/ are parts of scripts: what several share comes first, then the operation.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Script:
    """Lua that Redis knows by its hash, once it is loaded. Any may be run twice."""

    source: str
    sha: str


def _script(*names: str, begin: str = "") -> Script:
    """A script of these parts, with a line before the last of them."""
    folder = files(__package__) / "lua"
    parts = [(folder / f"{name}.lua").read_text() for name in names]
    parts[-1] = begin + "\n" + parts[-1]
    source = "\n" + "\n".join(parts[:-1]) + parts[-1]
    return Script(source, hashlib.sha1(source.encode()).hexdigest())


_SEATS = "prelude", "seats"  # members join and leave
_KEYS = "prelude", "keys"  # at most 4096 of them: Lua's stack has room for some thousand values
_FIND = *_KEYS, "find"

JOIN = _script(*_SEATS, "join")
RENEW = _script(*_SEATS, "renew")
LEAVE = _script(*_SEATS, "leave")
MEMBERS = _script("prelude", "members")
CLAIM = _script(*_KEYS, "claim")
PUBLISH = _script(*_KEYS, "publish", begin="local is_copy = false")
PUBLISH_COPIES = _script(*_KEYS, "publish", begin="local is_copy = true")
PUBLISH_NEW = _script("publish_new_fast", *_KEYS, "publish_new")
WITHDRAW = _script(*_KEYS, "withdraw")
GIVE_UP = _script(*_KEYS, "give_up")
ABANDON = _script(*_KEYS, "abandon")
HOLDERS = _script(*_FIND, "holders")
MATCH_PREFIX = _script(*_FIND, "match_prefix")
REMOVE = _script(*_FIND, "remove")
KEYS_OF = _script("prelude", "keys_of")
NUM_OBJECTS = _script("prelude", "num_objects")
SWEEP = _script(*_KEYS, "sweep")
