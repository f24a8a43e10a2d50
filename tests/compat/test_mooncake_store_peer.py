"""The same calls on Mooncake's own store: both give the same answers.

Runs where MOONCAKE_PEER_SITE names a folder with Mooncake's wheel
(`pip install --no-deps --target FOLDER mooncake-transfer-engine-non-cuda`). Starts its master, and
its client in a separate process. docs/serving/mooncake_store.md lists the intended differences,
which are not tested here.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore

from ..conftest import skip
from ..metadata.support import RedisServer, free_port
from .store_support import pool_file

# What both are asked, in this order: a call, and what its answer is made comparable by.
SCRIPT = r"""
import json, sys
import numpy as np
import torch

module, arguments = sys.argv[1], sys.argv[2:]
store_module = __import__(module, fromlist=["MooncakeDistributedStore"])
store = store_module.MooncakeDistributedStore()
config = store_module.ReplicateConfig()
answers = []

def ask(name, *args, **kwargs):
    answer = getattr(store, name)(*args, **kwargs)
    answers.append([name, str(args[:1])[:80], plain(answer)])

def plain(answer):
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    if isinstance(answer, bytes):
        return answer.hex()
    if isinstance(answer, torch.Tensor):
        return [str(answer.dtype), list(answer.shape), answer.float().tolist()]
    return answer if answer is None or isinstance(answer, int) else bytes(answer).hex()

answers.append(["health", "", store.health_check()])
answers.append(["close", "", store.close()])
ask("get", "before")
ask("get_tensor", "before")
answers.append(["setup", "", store.setup(
    "127.0.0.1", "P2PHANDSHAKE", 64 << 20, 32 << 20, "tcp", "", arguments[0])])
ask("health_check")
answers.append(["setup again", "", store.setup(
    "127.0.0.1", "P2PHANDSHAKE", 64 << 20, 32 << 20, "tcp", "", arguments[0])])
for name in ("get", "is_exist", "get_size", "remove", "get_buffer", "get_tensor"):
    ask(name, "none")
for name in ("get_batch", "batch_is_exist", "batch_remove", "batch_get_buffer"):
    ask(name, ["none", "nor"])
for value in (b"hello", b"hello", b"other"):
    ask("put", "a", value)
for name in ("get", "get_size", "is_exist", "get_buffer"):
    ask(name, "a")
ask("put", "e", b"")
ask("is_exist", "e")
ask("put", "", b"x")
ask("is_exist", "")
ask("get", "")
ask("put", "k" * 1000, b"1")
ask("put_parts", "p", b"ab", b"", b"cd")
ask("get", "p")
ask("put_parts", "p0")
ask("put_parts", "p1", b"", b"")
ask("batch_is_exist", ["p0", "p1"])
ask("put_batch", ["b1", "b2"], [b"1", b"22"])
ask("put_batch", ["b1", "b3"], [b"9", b"3"])
ask("get_batch", ["b1", "none", "b2", "b3"])
ask("put_batch", ["c1"], [b"1", b"2"])
ask("put_batch", [], [])
ask("put_batch", ["d", "d"], [b"1", b"2"])
ask("get", "d")
ask("put_batch", ["g1", "g2"], [b"", b"2"])
ask("get_batch", ["g1", "g2"])
ask("put", "ba", bytearray(b"xx"))
ask("batch_get_buffer", ["a", "none", "b2"])

memory = (np.arange(1 << 20) % 251).astype(np.uint8)
p = memory.ctypes.data

def see(offset, size):
    answers.append(["memory", str(offset), memory[offset : offset + size].tobytes().hex()])

for arguments in ((p, 1 << 20), (p, 1 << 20), (p + 4096, 4096), (p, 0), (0, 4096)):
    code = store.register_buffer(*arguments)
    answers.append(["register_buffer", "", code])
def at(*offsets):
    return [p + offset for offset in offsets]
def ask_at(name, *args, **kwargs):
    answer = getattr(store, name)(*args, **kwargs)
    answers.append([name, "", plain(answer)])

ask_at("put_from", "f", p, 1000)
ask_at("put_from", "f", p, 1000)
ask_at("put_from", "f0", p, 0)
ask_at("get_into", "f", p + 5000, 1000)
see(5000, 1000)
ask_at("get_into", "f", p + 5000, 2000)
ask_at("get_into", "f", p + 5000, 500)
ask_at("get_into", "none", p, 500)
ask_at("get_into", "f", p, 0)
ask_at("batch_put_from", ["q1", "q2", "f", "q4"], at(0, 100, 0, 0), [100, 100, 10, 0])
ask_at("batch_put_from", ["r1", "r2"], at(0), [10, 10])
ask_at("batch_put_from", [], [], [])
targets = at(2000, 3000, 4000, 5000)
ask_at("batch_get_into", ["q1", "none", "q2", "f"], targets, [100, 100, 50, 5000])
ask_at("batch_get_into", ["q1"], at(0, 0), [10, 10])
ask_at("batch_get_into", ["q1", "q1"], at(2000, 3000), [100, 100])
ask_at("batch_put_from_multi_buffers", ["m1", "m2"], [at(0, 200), at(400)], [[100, 100], [50]])
ask_at("batch_put_from_multi_buffers", ["m9"], [at(0, 200)], [[100]])
ask_at("batch_put_from_multi_buffers", ["m9", "m8"], [at(0, 200)], [[100, 100]])
ask_at("batch_put_from_multi_buffers", ["m9"], [[]], [[]])
ask_at("batch_put_from_multi_buffers", ["m7"], [at(0, 8)], [[0, 8]])
ask("get", "m1")
lists = [at(8000, 9000), at(9500), at(0)]
ask_at("batch_get_into_multi_buffers", ["m1", "m2", "none"], lists, [[100, 100], [50], [10]])
see(8000, 100)
see(9000, 100)
ask_at("batch_get_into_multi_buffers", ["m1"], [at(8000, 9000)], [[50, 150]])
see(8000, 50)
see(9000, 150)
ask_at("batch_get_into_multi_buffers", ["m1"], [at(8000)], [[50]])
ranges = store.get_into_ranges
for label, arguments in {
    "two": (at(10000, 20000), [["f", "m1"], ["f"]], [[[0, 100], [200]], [[5]]],
            [[[10, 20], [0]], [[0]]], [[[10, 20], [200]], [[1000]]]),
    "beyond": (at(10000), [["f"]], [[[0]]], [[[990]]], [[[20]]]),
    "none": (at(10000), [["none"]], [[[0]]], [[[0]]], [[[20]]]),
    "shape": (at(10000), [["f"]], [[[0, 1]]], [[[0]]], [[[20]]]),
    "mixed": (at(10000), [["none", "f"]],
              [[[0], [100, 200]]], [[[0], [0, 995]]], [[[20], [10, 10]]]),
    "empty": ([], [], [], [], []),
    "zero": (at(0), [["f"]], [[[0]]], [[[0]]], [[[0]]]),
    "outer": (at(0, 0), [["f"]], [[[0]]], [[[0]]], [[[0]]]),
}.items():
    answers.append(["get_into_ranges", label, ranges(*arguments)])
see(10000, 10)
see(20005, 1000)

ask("upsert", "a", b"changed")
ask("get", "a")
ask("upsert", "un", b"new")
ask("upsert_parts", "a", b"x", b"y")
ask("get", "a")
ask("upsert_batch", ["a", "b1"], [b"A", b"B"])
ask_at("upsert_from", "f", p, 10)
ask("get_size", "f")
ask_at("batch_upsert_from", ["f", "q1"], at(0, 0), [20, 30])
ask("upsert", "a", b"")
ask("get", "a")
ask("remove", "a", True)
ask("is_exist", "a")
ask("batch_remove", ["b1", "none"], True)
ask("batch_remove", [])
for key in ("rx1", "rx2", "ry", "k-abc"):
    ask("put", key, b"1")
for pattern in ("rx.", "abc", "^y", "(", "zzz"):
    ask("remove_by_regex", pattern, True)
ask("batch_is_exist", ["rx1", "rx2", "ry", "k-abc"])

for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
    ask("put_tensor", str(dtype), (torch.arange(12).reshape(3, 4) % 2).to(dtype))
    ask("get_tensor", str(dtype))
ask("put_tensor", "ts", torch.arange(12).reshape(3, 4).t())
ask("get_tensor", "ts")
ask("put_tensor", "te", torch.empty(0, 3))
ask("get_tensor", "te")
ask("put_tensor", "tx", 5)
ask("put_tensor", "t5", torch.ones(1, 2, 3, 4, 5))
ask("put_tensor", "t9", torch.ones([1] * 9))
ask("put", "bytes", b"abc")
ask("get_tensor", "bytes")
ask("batch_put_tensor", ["bt1", "bt2"], [torch.ones(2), torch.zeros(3)])
ask("batch_get_tensor", ["bt1", "none", "bt2"])
ask("batch_put_tensor", ["bt1"], [torch.ones(2), torch.zeros(3)])
ask("put_tensor_with_tp", "tp", torch.arange(8.0).reshape(2, 4), 0, 2, 1)
ask("batch_is_exist", ["tp", "tp_tp_0", "tp_tp_1"])
ask("get_tensor_with_tp", "tp", 1, 2, 1)
ask("get_tensor_with_tp", "tp")
ask("put_tensor_with_tp", "odd", torch.arange(5.0), 0, 2, 0)
ask("pub_tensor", "pt", torch.ones(2))

config.replica_num = 2
ask("put", "r2", b"1", config)
config.replica_num = 0
ask("put", "r0", b"1", config)
config.replica_num, config.with_hard_pin = 1, True
ask("put", "hp", b"1", config=config)
ask("remove", "hp", True)
answers.append(["defaults", "", [
    int(config.nof_replica_num), int(config.dfs_replica_num), int(config.soft_pin_action),
    config.soft_pin_ttl_ms, config.group_ids, config.preferred_segments, int(config.data_type),
    config.prefer_alloc_in_same_node, config.preferred_segment,
]])

ask_at("put_from_with_metadata", "md", p, p + 1000, 50, 16)
ask("get", "md")
ask("put_tensor", "ti", torch.arange(6.0).reshape(2, 3))
ask("get_tensor_into", "ti", p, 4096)
ask("get_tensor_into", "ti", p, 20)
ask("get_tensor_into", "none", p, 4096)
ask_at("batch_get_tensor_into", ["ti", "none"], at(0, 4096), [4096, 4096])
size = store.get_size("ti")
ask_at("put_tensor_from", "tj", p, size)
ask("get_tensor", "tj")
ask_at("put_tensor_from", "tk", p, 4096)
ask_at("put_tensor_from", "tk", p + 2048, 1000)
ask("is_exist", "tk")
ask_at("batch_put_tensor_from", ["tl", "tm"], at(0, 0), [size, size])
ask_at("batch_upsert_tensor_from", ["tl", "tn"], at(0, 0), [size, size])
tensors = [torch.ones(2), torch.zeros(3)]
ask_at("batch_pub_tensor", ["bp1", "bp2"], tensors)
ask_at("batch_upsert_tensor", ["bp1", "bp3"], tensors)
ask("get_tensor", "bp1")
ask_at("batch_upsert_tensor", ["bp1"], tensors)
answers.append(["pub tp", "", store.pub_tensor_with_tp("ptp", torch.arange(4.0), tp_size=2)])
ask("get_tensor_with_tp", "ptp", 1, 2)

def parallelism(*axes):
    made = store_module.TensorParallelism()
    made.axes = [axis_of(*one) for one in axes]
    return made

def axis_of(kind, rank, size, split_dim=None, expert_id=None, stage_id=None):
    axis = store_module.ParallelAxis()
    axis.kind, axis.rank, axis.size, axis.split_dim = kind, rank, size, split_dim
    axis.expert_id, axis.stage_id = expert_id, stage_id
    return axis

def target(mode, *axes):
    made = store_module.ReadTarget()
    made.mode, made.parallelism = mode, parallelism(*axes) if axes else None
    return made

defaults = store_module.ParallelAxis(), store_module.ReadTarget()
answers.append(["parallelism", "", [
    [getattr(defaults[0], name) for name in
     ("kind", "rank", "size", "split_dim", "expert_id", "stage_id")],
    defaults[1].mode, defaults[1].parallelism, store_module.TensorParallelism().axes,
]])
whole = torch.arange(32.0).reshape(8, 4)
put, read = "put_tensor_with_parallelism", "get_tensor_with_parallelism"
def tp(rank, size, split_dim=0):
    return "tp", rank, size, split_dim
for rank, part in enumerate(whole.chunk(4)):
    ask_at(put, "ps", part, parallelism(tp(rank, 4)))
ask_at("batch_is_exist", ["ps", "ps_tp_0", "ps_tp_3", "ps_tp_4"])
for size in (1, 2, 4, 8):
    for rank in range(size):
        ask_at(read, "ps", target("shard", tp(rank, size)))
    ask_at(read, "ps", target("full", tp(0, size)))
ask_at(read, "ps")
ask_at(read, "ps", target("as_stored", tp(0, 4)))
ask_at(read, "ps", target("shard"))
ask_at(read, "ps", 5)
for rank in range(2):
    ask_at(put, "pd", whole, parallelism(tp(rank, 2, 1), ("dp", 1, 2)))
for rank in range(4):
    ask_at(read, "pd", target("shard", ("dp", 1, 2), tp(rank, 4, 1)))
ask_at(read, "pd", target("shard", ("dp", 0, 2), tp(0, 2, 1)))
ask_at(read, "pd", target("shard", tp(0, 2, 1)))
ask_at(read, "pd", target("FULL", tp(0, 1, 1), ("DP", 1, 2)))
for kind in (("dp", 0, 2), ("ep", 0, 2, None, 3), ("pp", 1, 2, None, None, 7)):
    ask_at(put, "po", whole, parallelism(kind))
    ask_at(read, "po", target("shard", kind))
ask_at("batch_is_exist", ["po", "po__dp_0of2", "po__ep_0of2_eid3", "po__pp_1of2_sid7"])
class Partition:
    rank, size, split_dim = 1, 2, 0
ask_at(put, "pw", whole, None, config, Partition)
Partition.rank = 0
ask_at(put, "pw", whole, writer_partition=Partition)
ask_at(read, "pw", target("full"))
ask_at(read, "pw", target("shard", tp(1, 2)))
ask_at(put, "pn", whole)
for one in (None, target("as_stored"), target("full")):
    ask_at(read, "pn", one)
ask_at("upsert_tensor_with_parallelism", "pn", -whole)
ask_at(read, "pn", None)
for wrong in ((tp(4, 4),), (tp(-1, 4),), (tp(0, 0),), (tp(0, 2, None),), (tp(0, 2, 2),),
              (tp(0, 2, -1),), (tp(0, 2), tp(1, 2)), (), (("dp", 0, 2, 0),), (("ep", 0, 2),),
              (("pp", 0, 2),), (("xp", 0, 2),), (tp(0, 3), ("dp", 0, 2))):
    ask_at(put, "pe", whole, parallelism(*wrong))
    if wrong and wrong[0][3:] not in ((2,), (-1,)):  # no axes, of which Mooncake reads something
        ask_at(read, "ps", target("shard", *wrong))
ask_at(put, "pe", whole, 5)
ask_at(put, "pe", whole, parallelism(tp(0, 2)), config, Partition)
ask_at(put, "pe", whole, writer_partition=5)
Partition.size = 3
ask_at(put, "pe", whole, writer_partition=Partition)
ask_at(put, "pe", torch.tensor(1.0), parallelism(tp(0, 2)))
both, one = [parallelism(tp(0, 2)), None], [parallelism(tp(0, 2))]
ask_at("batch_" + put, ["pf", "pg"], [whole[:4], whole], both)
ask_at("batch_is_exist", ["pf_tp_0", "pf", "pg"])
ask_at("batch_" + put, ["ph", "pi"], [whole[:4], whole], one)
ask_at("batch_" + put, ["ph", "pi"], [whole[:4]], both)
ask_at("batch_" + put, ["ph"], [whole[:4]], one, config, [Partition])
ask_at("batch_" + read, ["pn", "none"])
ask_at("batch_" + read, ["pn", "ps", "none"], [None, target("shard", tp(1, 2)), target("full")])
ask_at("batch_" + read, ["pn", "ps"], [None])
ask("put_tensor", "px", whole)
size = store.get_size("px")
ask_at("get_tensor_into", "px", p, size)
for number, layout in enumerate(((tp(1, 2),), (tp(1, 2), ("dp", 0, 2)), (("dp", 0, 2),), ())):
    layout = parallelism(*layout) if layout else None
    ask_at(put + "_from", f"py{number}", p, size, layout)
ask_at("batch_is_exist", ["py0_tp_0", "py0_tp_1", "py2__dp_0of2", "py3"])
Partition.size = 2
ask_at(put + "_from", "py4", p, size, writer_partition=Partition)
ask_at(put + "_from", "py5", p, size + 8, parallelism(tp(0, 2)))
ask_at("batch_" + put + "_from", ["pz", "pq"], at(0, 0), [size, size], both)
for one in (target("full", tp(0, 4)), target("shard", tp(1, 4)), target("shard", tp(0, 2))):
    ask_at(read + "_into", "py0", p + 8192, 4096, one)
ask_at(read + "_into", "py0", p + 8192, 100, target("full", tp(0, 4)))
ask_at(read + "_into", "none", p + 8192, 4096)
ask_at("batch_" + read + "_into", ["py0", "px"], at(8192, 16384), [4096, 4096],
       [target("shard", tp(1, 2)), None])
ask_at("batch_" + read + "_into", ["py0", "px"], at(0), [4096, 4096])

import os, tempfile
from safetensors.torch import load_file, save_file
os.chdir(tempfile.mkdtemp())
save, load = "save_tensor_to_safetensor", "load_tensor_from_safetensor"
ask(save, "px", "file")
ask(save, "px")
for name in ("file", "px"):
    answers.append([save, name, {key: plain(one) for key, one in load_file(name).items()}])
ask(save, "none", "other")
ask(save, "bytes", "other")
ask(save, "px", "nowhere/file")
answers.append(["files", "", sorted(os.listdir("."))])
ask(load, "fa", "file")
ask("get_tensor", "fa")
answers.append([load, "", plain(store.load_tensor_from_safetensor(file_name="file"))])
ask("get_tensor", "file")
save_file({"fb": -whole, "fa": 2 * whole}, "two")
for key in ("fb", "fa", "fc"):
    ask(load, key, "two")
    ask("get_tensor", key)
save_file({}, "empty")
for name in ("empty", "none"):
    ask(load, "fd", name)
ask("is_exist", "fd")
for name in os.listdir("."):
    os.unlink(name)
os.rmdir(os.getcwd())

memory[:] = np.arange(1 << 20) % 251
start, end = "batch_put_session_start", "batch_put_session_end"
write, revoke = "batch_put_from_multi_buffer_ranges", "batch_put_session_revoke"
ask_at(start, ["s1", "s2", "s0"], [1000, 2000, 0])
ask_at("batch_is_exist", ["s1", "s2"])
ask("get", "s1")
ask_at("put", "s1", b"other")
ask_at(write, ["s1", "s2"], [at(0, 500), at(0)], [[500, 500], [1000]], [[0, 500], [1000]])
ask_at(write, ["s1", "s2", "no"], [at(0)] * 3, [[1001], [1000], [10]], [[0], [1500], [0]])
ask_at(write, ["s1", "s2"], [at(0)] * 2, [[10]], [[0]])
ask_at(write, ["s1", "s2"], [at(0)] * 2, [[10], [10, 10]], [[0], [0]])
ask_at(start, ["s1"], [1000])
ask_at(start, ["ti"], [1000])
ask_at(end, ["s1", "no"])
ask("get", "s1")
ask_at(revoke, ["s2", "no", "s1"])
ask_at("is_exist", "s2")
ask_at(end, ["s2"])
ask_at(end, ["s1"])
ask_at(start, ["s2"], [100])
ask_at(write, ["s2"], [at(0)], [[100]], [[0]])
ask_at(end, ["s2"])
ask("get", "s2")
ask_at(start, ["q1", "q2"], [100])
ask_at(start, [], [])
ask_at(start, ["big"], [1 << 30])
start, end = "batch_get_session_start", "batch_get_session_end"
read = "batch_get_into_multi_buffer_ranges"
ask_at(read, ["s1"], [at(0)], [[10]], [[0]])
ask_at(start, ["s1", "none", "s2"])
ask_at(read, ["s1", "s2"], [at(30000, 30100), at(30200)], [[100, 50], [64]], [[10, 900], [0]])
see(30000, 300)
ask_at(read, ["none", "s1"], [at(0), at(0)], [[10], [10]], [[0], [995]])
ask_at(read, ["s1", "s2"], [at(0)], [[100]], [[0]])
ask_at(read, ["s1"], [at(0, 0)], [[100]], [[0]])
ask_at("remove", "s1", True)
ask_at(read, ["s1"], [at(30000)], [[10]], [[0]])
ask_at(end, ["s1", "s2", "none"])
ask_at(end, ["s1"])
ask_at(end, [])
ask_at(read, ["s2"], [at(0)], [[10]], [[0]])
ask_at(start, [])

def described(replicas):
    found = []
    for one in replicas:
        memory = one.get_memory_descriptor().buffer_descriptor
        kinds = one.is_memory_replica(), one.is_disk_replica(), one.is_local_disk_replica()
        found.append([int(one.status), *kinds, memory.size, memory.buffer_address > 0])
    return found
answers.append(["replicas", "", described(store.get_replica_desc("s2"))])
answers.append(["replicas", "", described(store.get_replica_desc("none"))])
both = store.batch_get_replica_desc(["s2", "none", "ti"])
answers.append(["replicas", "", sorted(both)])
ask_at("batch_replica_clear", ["s2"], "nowhere")
ask_at("batch_replica_clear", [])
for task in (store.create_copy_task("ti", ["nowhere"]), store.create_move_task("ti", "a", "b"),
             store.query_task((1, 2))):
    answers.append(["task", "", task])
ask_at("unregister_buffer", p + 10)
ask_at("unregister_buffer", p)
ask_at("unregister_buffer", p)
ask("put", "b", b"buf")
handle = store.get_buffer("b")
ask("remove", "b", True)
answers.append(["handle", "", [bytes(handle).hex(), handle.size(), len(handle), handle.ptr() > 0]])
del handle
answers.append(["remove_all", "", store.remove_all(True) > 0])
ask("remove_all", True)
ask("close")
ask("close")
ask("health_check")
ask("get", "a")
print("ANSWERS" + json.dumps(answers))
"""

# The same about segments, for which a store of ours needs a directory.
SEGMENTS = r"""
import json, sys, time

module, address, file = sys.argv[1:]
store = __import__(module, fromlist=["MooncakeDistributedStore"]).MooncakeDistributedStore()
answers = []
MIB = 1 << 20

def ask(name, *args, **kwargs):
    answer = getattr(store, name)(*args, **kwargs)
    if isinstance(answer, dict):
        ids = answer["segment_ids"]
        kinds = [type(ids).__name__, *[type(one).__name__ for one in ids], len(set(ids))]
        answers.append([name, sorted(answer), answer["ret"], kinds, answer.get("allocated_size")])
        return ids
    answers.append([name, answer.hex() if isinstance(answer, bytes) else answer])

answers.append(["setup", "", store.setup(
    "127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", address)])
for size in (0, 1, 16 * MIB, 16 * MIB + 1, 100 * MIB):
    ids = ask("allocate_and_mount_segment", size)
    ask("unmount_segment", ids)
    ask("unmount_and_free_segment", ids)
    ask("unmount_and_free_segment", ids)
for path, size, offset in (
    (file + "-none", MIB, 0), (file, 32 * MIB, 0), (file, 0, 0), (file + "-none", 0, 0),
    (file, MIB, 5), (file, 16 * MIB, 4096), (file, 1000, 0), ("/dev/shm", MIB, 0),
    ("/dev/null", 4096, 0), (file, MIB, 2**64 - 4096), (file, 8 * MIB, 0),
):
    ids = ask("mount_segment", path, size, offset)
    ask("unmount_and_free_segment", ids)
    ask("unmount_segment", ids)
    ask("unmount_segment", ids)
for name in ("unmount_segment", "unmount_and_free_segment"):
    for ids in ([], ["none"], ["1-2"], [""], ["none", "1-2"]):
        ask(name, ids)
    ask(name, [], 5)
first = ask("allocate_and_mount_segment", 16 * MIB, "tcp", "cpu:0")
second = ask("mount_segment", path=file, size=16 * MIB, protocol="tcp", location="")
ask("put", "a", b"value")
ask("unmount_and_free_segment", segment_ids=["none", *first])
ask("unmount_segment", second, grace_period_seconds=0)
ask("is_exist", "a")
ask("get", "a")
ids = ask("allocate_and_mount_segment", 16 * MIB, protocol="any", location="any")
ask("put", "a", b"value")
ask("unmount_and_free_segment", ids, 5)
ask("unmount_and_free_segment", ids)
ask("unmount_and_free_segment", ids, 5)
ask("is_exist", "a")
ask("get", "a")
until = time.monotonic() + 60
while store.is_exist("a") and time.monotonic() < until:
    time.sleep(0.1)
ask("get", "a")
while store.unmount_and_free_segment(ids) == -600 and time.monotonic() < until:
    time.sleep(0.1)
ask("unmount_and_free_segment", ids)
ask("allocate_and_mount_segment", 16 * MIB)
ask("unmount_local_disk_segment")
ask("unmount_local_disk_segment", 1)
ask("close")
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture
def site() -> Path:
    folder = os.environ.get("MOONCAKE_PEER_SITE", "")
    if not folder:
        skip("mooncake", "MOONCAKE_PEER_SITE does not name a folder with Mooncake's wheel")
    return Path(folder)


@pytest.fixture
def master(site):
    port, metrics = free_port(), free_port()
    command = [site / "mooncake/mooncake_master", f"--rpc_port={port}", f"--metrics_port={metrics}"]
    process = subprocess.Popen(
        [*command, "--rpc_address=127.0.0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def answers_of(
    module: str, address: str, *folders: Path, script: str = SCRIPT, arguments: Sequence[str] = ()
) -> list:
    """What a store says to all of the script, in a process of its own."""
    path = os.pathsep.join([*map(str, folders), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", script, module, address, *arguments],
        env=os.environ | {"PYTHONPATH": path, "MC_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = [line for line in ran.stdout.splitlines() if line.startswith("ANSWERS")]
    assert found, ran.stderr[-2000:]
    return json.loads(found[0].removeprefix("ANSWERS"))


SIGNATURES = r"""
import json, re
from mooncake.store import MooncakeDistributedStore as Theirs

found = {}
for name in dir(Theirs):
    doc = getattr(Theirs, name).__doc__ or ""
    if not name.startswith("_") and (first := re.match(r"\w+\(self[^,)]*,? ?(.*)\) -> ", doc)):
        found[name] = re.findall(r"(\w+): ", re.sub(r"<[^>]*>", "", first[1]))
print(json.dumps(found))
"""

# What is not here, and docs/serving/mooncake_store.md says so.
ABSENT = re.compile("init_all|get_offload_rpc_read_count")

OVERLOADED = ("setup", "put_parts", "upsert_parts")


def test_call_signatures_match_mooncake(site):
    environment = os.environ | {"PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", SIGNATURES], env=environment, capture_output=True, text=True
    )
    theirs = json.loads(ran.stdout)
    assert len(theirs) > 60 and theirs["get_into"] == ["key", "buffer_ptr", "size"]
    for name, arguments in theirs.items():
        if ABSENT.fullmatch(name):
            assert not hasattr(MooncakeDistributedStore, name)
            continue
        if name in OVERLOADED:
            continue
        ours = list(inspect.signature(getattr(MooncakeDistributedStore, name)).parameters)[1:]
        for mine, argument in zip(ours, arguments, strict=True):
            assert argument in (mine, "arg0"), name  # which some of Mooncake's are called


def test_results_match_mooncake(site, master):
    with pool_file() as path:
        ours = answers_of("mooncake_serving.compat.mooncake.store", path)
    theirs = answers_of_mooncake(master, site)
    assert len(ours) > 100
    assert ours == theirs


def test_segment_results_match_mooncake(site, master, tmp_path):
    pytest.importorskip("redis")
    with pool_file() as file:

        def asked() -> dict:
            Path(file).write_bytes(bytes(16 << 20))
            return {"script": SEGMENTS, "arguments": [file]}

        server = RedisServer(tmp_path)
        ours = answers_of("mooncake_serving.compat.mooncake.store", server.url, **asked())
        server.stop()
        theirs = answers_of_mooncake(master, site, **asked())
    assert len(ours) > 60
    assert ours == theirs


def answers_of_mooncake(master: str, site: Path, **asked) -> list:
    for _ in range(50):  # the master may not listen yet; its client then fails at once
        theirs = answers_of("mooncake.store", master, site, **asked)
        if ["setup", "", 0] in theirs:
            break
        time.sleep(0.1)
    return theirs
