"""Where the fuzzers start: valid conversations and nearly valid ones. ``seeds.py <folder>``

Also writes a dictionary of frames, so that a mutation with one of them may be understood.
"""

import struct
import sys
from pathlib import Path

MAGIC = b"MKTRNSFR"
WRITE, READ, CHECK_WRITE, CHECK_READ, NOTIFY, REGIONS = range(1, 7)
NICS, ATTACH, DETACH, KEYS, FLUSH, FENCE, LIST, GPUS, VERIFY_WRITE, VERIFY_READ, ASK = range(7, 18)
HAS_SECRET, PROVES, OWN_HELLO, READS, IS_LONG, NOTIFIES, IS_SHARED, LISTS = (
    1 << bit for bit in range(8)
)
ARENA = 0x2000_0000_0000
READ_WRITE, READ_ONLY, WRITE_ONLY = ARENA + 0x4000, ARENA + 0x5000, ARENA + 0x8010
LOCAL_BYTES = 0x3000
MAX_RANGES = 8192
READ_OBJECTS, WRITE_OBJECTS, REMOVE_OBJECTS = 1, 2, 3
SUMS, COMPARE = 1, 2
WHOLE = 2**64 - 1


def hello(version: int = 6, flags: int = 0, name: bytes = b"seed:1", epoch: int = 1) -> bytes:
    prefix = struct.pack("<8sIIQ", MAGIC, version, len(name), 77)
    return prefix + name + struct.pack("<IHHQQ32s", flags, 3, 2, 5, epoch, bytes(32)) + b"a:1b/"


def welcome(verdict: int = 0) -> bytes:
    return struct.pack("<II32s", verdict, 0, bytes(32))


def header(op: int, num_ranges: int, num_bytes: int, request: int = 1) -> bytes:
    return struct.pack("<IIQQQ32x", op, num_ranges, request, 0, num_bytes)


def batch(op: int, ranges: list[tuple[int, int]], request: int = 1) -> bytes:
    moved = sum(size for _, size in ranges) if op in (WRITE, READ) else 0
    table = b"".join(struct.pack("<QQ", at, size) for at, size in ranges)
    zeros = bytes(-(64 + len(table)) % 64)
    payload = zeros + bytes(moved) if op == WRITE else b""
    return header(op, len(ranges), moved, request) + table + payload


def verify(op: int, ranges: list[tuple[int, int]]) -> bytes:
    table = b"".join(struct.pack("<QQ", at, size) for at, size in ranges)
    return header(op, len(ranges), 8 * len(ranges)) + table + bytes(8 * len(ranges))


def ask(question: bytes, payload: bytes = b"") -> bytes:
    num_bytes = len(question) + len(payload)
    return struct.pack("<IIQQQ32x", ASK, 0, 1, len(question), num_bytes) + question + payload


def objects(kind: int, entries: list[tuple[int, ...]], flags: int = 0) -> bytes:
    """A question about objects, by their hashes."""
    rows = [struct.pack("<QQ" + "Q" * len(rest), hash_, 0, *rest) for hash_, *rest in entries]
    return struct.pack("<IIII16x", kind, flags, len(rows), 0) + b"".join(rows)


def ack(num_bytes: int, status: int = 0, text: bytes = b"") -> bytes:
    return struct.pack("<IIQQ40x", status, len(text), 1, num_bytes) + text


# Number, first packet, MTU, reads, LID, link layer, kind of GID, GID.
QUEUE_PAIR = struct.pack(
    "<IIIIIHH16s", 17, 99, 1024, 16, 0, 2, 3, bytes(10) + b"\xff\xff\x0a\0\0\1"
)
# Of two regions: on two NICs, the second one in two pieces; and on none.
KEYS_ANSWER = struct.pack("<QQQII", 0x1000, 0x3000, 3, 6, 3)
KEYS_ANSWER += struct.pack("<QQII", 0x1000, 0x3000, 7, 0)
KEYS_ANSWER += struct.pack("<QQII", 0x1000, 0x1000, 8, 1)
KEYS_ANSWER += struct.pack("<QQII", 0x2000, 0x2000, 9, 1)
KEYS_ANSWER += struct.pack("<QQQII", 0x8000, 0x10, 0, 2, 0)

BATCHES = {
    "write": batch(WRITE, [(READ_WRITE, 64), (WRITE_ONLY, 32)]),
    "read": batch(READ, [(READ_WRITE, 64), (READ_ONLY, 0x1000)]),
    "check_write": batch(CHECK_WRITE, [(READ_WRITE, 0x1000)]),
    "check_read": batch(CHECK_READ, [(READ_ONLY, 1)]),
    "notify": header(NOTIFY, 0, 5) + b"hello",
    "write_read_only": batch(WRITE, [(READ_ONLY, 8)]),
    "read_write_only": batch(READ, [(WRITE_ONLY, 8)]),
    "write_across": batch(WRITE, [(READ_WRITE + 0xFFC, 8)]),
    "write_before": batch(WRITE, [(READ_WRITE - 4, 8)]),
    "write_behind": batch(WRITE, [(WRITE_ONLY + 0xFF0, 2)]),
    "read_wrapping": batch(CHECK_READ, [(READ_WRITE, 2**64 - 1)]),
    "write_many": batch(WRITE, [(READ_WRITE + 2 * i, 1) for i in range(100)]),
    "write_beyond": header(WRITE, 1, 16 << 20) + struct.pack("<QQ", READ_WRITE, 16 << 20),
    "read_beyond": header(READ, 1, 256 << 20) + struct.pack("<QQ", READ_WRITE, 256 << 20),
    "too_many": header(WRITE, MAX_RANGES + 1, MAX_RANGES + 1),
    "regions": header(REGIONS, 0, 0),
    "nics": header(NICS, 0, 0),
    "attach": header(ATTACH, 0, 48) + struct.pack("<II", 3, 1) + QUEUE_PAIR,
    "detach": header(DETACH, 0, 8) + struct.pack("<II", 3, 0),
    "keys": header(KEYS, 0, 16) + struct.pack("<QQ", READ_WRITE, WRITE_ONLY + 1),
    "flush": header(FLUSH, 0, 8) + struct.pack("<II", 3, 4),
    "fence": header(FENCE, 0, 16) + struct.pack("<QQ", 9, 1),
    "list": header(LIST, 0, 0),
    "verify_write": verify(VERIFY_WRITE, [(READ_WRITE, 64), (WRITE_ONLY, 0xFF1)]),
    "verify_read": verify(VERIFY_READ, [(READ_ONLY, 0x1000)]),
    "verify_write_only": verify(VERIFY_READ, [(WRITE_ONLY, 8)]),
    "verify_across": verify(VERIFY_WRITE, [(READ_WRITE + 0xFFC, 8)]),
    "read_objects": ask(objects(READ_OBJECTS, [(n, WHOLE, WHOLE) for n in range(1, 6)], SUMS)),
    "compare_objects": ask(objects(READ_OBJECTS, [(1, 8, 16), (3, 0, 64), (2, 0, 0)], COMPARE)),
    "read_objects_beyond": ask(
        objects(READ_OBJECTS, [(1, 100, 1), (1, 2**64 - 2, 9), (2, WHOLE, 4095)], SUMS | COMPARE)
    ),
    "write_objects": ask(
        objects(WRITE_OBJECTS, [(9, 3, 0), (1, 5, 0), (10, 2, 77), (9, 1, 0), (11, 0, 0)]),
        b"new, again",
    )
    + ask(objects(READ_OBJECTS, [(9, WHOLE, 64)])),
    "write_objects_large": ask(objects(WRITE_OBJECTS, [(9, 9000, 0), (10, 5000, 0)]), bytes(14000)),
    "write_objects_listed": ask(objects(WRITE_OBJECTS, [(12, 5, 0)], flags=4), b"hello"),
    "write_objects_short": ask(objects(WRITE_OBJECTS, [(9, 30, 0), (10, 4, 0)]), bytes(20)),
    "remove_objects": ask(objects(REMOVE_OBJECTS, [(1,), (77,), (1,), (4,)])),
    "ask_what": ask(b"?") + ask(objects(4, [(1,)])) + ask(objects(READ_OBJECTS, [])),
    "ask_nothing": ask(b""),
    "ask_too_much": struct.pack("<IIQQQ32x", ASK, 0, 1, 16, 17 + (64 << 20)),
    "unknown": header(18, 0, 0),
}
# Where the initiator will write: by address, in a memory that is not sent, behind the end of all.
REGION_TABLE = b"".join(
    struct.pack("<QQQQIIII", address, 0x3000, 1, 0, slot, 6, memory, 0)
    for address, slot, memory in ((0x1000, 0, 2**32 - 1), (0x1000, 1, 0), (2**64 - 0x3000, 2, 7))
)
ANSWERS = {
    "regions": ack(len(REGION_TABLE)) + REGION_TABLE,
    "region": ack(48) + REGION_TABLE[:48] + bytes(1),
    "no_regions": ack(0) + bytes(1),
    "list": ack(48) + struct.pack("<QQIIQQII", 1 << 40, 8, 6, 0, 2**64 - 8, 7, 2, 0),
    "wrong_list": ack(24) + struct.pack("<QQII", 2**64 - 8, 9, 6, 0),
    "acks": ack(LOCAL_BYTES // 3 * 3) + ack(4),
    "read": ack(LOCAL_BYTES // 3 * 3) + bytes(LOCAL_BYTES // 3 * 3),
    "refused": ack(0, status=1, text=b"descriptors[0] remote range is not inside"),
    "refused_later": ack(0) + ack(0, status=1, text=b"no"),
    "checked": ack(0) + ack(0) + ack(MAX_RANGES) + ack(10) + ack(4),
    "checked_read": ack(0) + ack(0) + ack(MAX_RANGES) + bytes(MAX_RANGES) + ack(10) + bytes(10),
    "verified": ack(LOCAL_BYTES // 3 * 3) + ack(8) + struct.pack("<Q", 3) + ack(4),
    "differs": ack(LOCAL_BYTES // 3 * 3) + ack(8) + struct.pack("<Q", 1),
    "asked": ack(0) + ack(9) + b"an answer" + ack(LOCAL_BYTES // 3 * 3) + ack(4),
    "not_asked": ack(0) + ack(0, status=1, text=b"it serves no objects"),
    "asked_too_much": ack(0) + ack((64 << 20) + 1),
    "listed_verified": ack(0) + ack(0) + ack(LOCAL_BYTES // 3 * 3) + ack(8) + struct.pack("<Q", 3),
    "malformed": ack(0, status=1) + ack(2**63) + ack(0, status=7),
}


def session_seeds() -> dict[str, bytes]:
    modes = {"plain": 0, "proved": HAS_SECRET | PROVES}
    seeds = {
        f"{kind}_{name}": bytes([mode]) + frame
        for kind, mode in modes.items()
        for name, frame in BATCHES.items()
    }
    seeds["all"] = bytes([0]) + b"".join(BATCHES[name] for name in list(BATCHES)[:12])
    seeds["wrong_proof"] = bytes([HAS_SECRET]) + bytes(32) + BATCHES["write"]
    for name, said in {
        "hello": hello() + BATCHES["write"],
        "version_1": hello(version=1),
        "flags": hello(flags=3),
        "long_name": hello(name=b"x" * 255),
        "old": hello(epoch=0),
    }.items():
        seeds[f"own_{name}"] = bytes([OWN_HELLO]) + said
        seeds[f"own_secret_{name}"] = bytes([OWN_HELLO | HAS_SECRET]) + said
    return seeds


def initiator_seeds() -> dict[str, bytes]:
    kinds = [0, READS, IS_LONG, IS_LONG | READS, IS_SHARED, IS_SHARED | READS]
    kinds += [LISTS, LISTS | READS, LISTS | IS_LONG]  # these ask for checksums, too
    modes = {
        f"{kind | notifies | secret:02x}": kind | notifies | secret | PROVES
        for kind in kinds
        for notifies in (0, NOTIFIES)
        for secret in (0, HAS_SECRET)
    }
    seeds = {
        f"{kind}_{name}": bytes([mode]) + answer
        for kind, mode in modes.items()
        for name, answer in ANSWERS.items()
    }
    for verdict in range(11):
        for flags in (0, HAS_SECRET):
            said = hello(flags=flags) + welcome(verdict) + ANSWERS["acks"]
            seeds[f"verdict_{verdict}_{flags}"] = bytes([OWN_HELLO | flags]) + said
    seeds["version_1"] = bytes([OWN_HELLO]) + hello(version=1)
    return seeds


def pool_seeds() -> dict[str, bytes]:
    """Changes to the memory of a pool: part of its layout, how, word, value."""
    changes = {
        f"{part}_{how}_{word}_{value:x}": struct.pack("<BBHI", part, how, word, value)
        for part in range(11)
        for how in (0, 1)
        for word in (0, 1, 2, 5, 12, 13)
        for value in (0, 1, 7, 2**32 - 1)
    }
    return {"none": b"", **changes, "all": b"".join(list(changes.values())[::7])}


def words() -> dict[str, bytes]:
    """Entries of the dictionary: at most 64 bytes."""
    found = {f"batch_{name}": frame for name, frame in BATCHES.items() if len(frame) <= 64}
    found |= {f"begin_{name}": frame[:64] for name, frame in BATCHES.items() if len(frame) > 64}
    found |= {f"ack_{size}": ack(size) for size in (0, 4, 10, MAX_RANGES, LOCAL_BYTES)}
    found |= {f"at_{at:x}": struct.pack("<Q", at) for at in (READ_WRITE, READ_ONLY, WRITE_ONLY)}
    found |= {"magic": MAGIC, "hello": hello()[:24], "welcome": welcome(), "max": b"\xff" * 8}
    return found


def main(folder: Path) -> None:
    seeds_of = {
        "session": session_seeds(),
        "initiator": initiator_seeds(),
        "keys": {"keys": KEYS_ANSWER, "queue_pair": QUEUE_PAIR},
        "pool": pool_seeds(),
    }
    for target, seeds in seeds_of.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, seed in seeds.items():
            (folder / target / name).write_bytes(seed)
    quoted = ('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"' for word in words().values())
    lines = [f"{name}={word}" for name, word in zip(words(), quoted, strict=True)]
    (folder / "dictionary").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
