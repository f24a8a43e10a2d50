"""A process that closes nothing ends, prints no errors, and its node leaves the directory."""

import pytest

from mooncake_serving.store.directory import connect

from ...transfer.scripts import run_fork

# Handlers of the interpreter's end run after its executors were shut down: the threads of a node
# run on for several of its beats, before the node is closed by a handler that was registered first.
ENDING = """
import atexit, time
import numpy as np
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine
url, folder = {url!r}, {folder!r}
{made}
atexit.register(time.sleep, 1.5)
"""
TIERED = """
from mooncake_serving.store import SsdTier, TieredStore
tier = SsdTier(folder + "/tier", 4 << 20, bucket_bytes=1 << 20)
store = TieredStore(ObjectPool.create(1 << 20), tier, min_uses=1)
"""
NODE = """
from mooncake_serving.store import ClusterStore, Node, directory
engine, servers = TransferEngine("exits", metadata=url), directory.connect(url)
cluster = ClusterStore(Node(store, engine, servers, ttl_s=1.0))
assert [member.name for member in cluster.members()] == ["exits"]
"""
PUTS = """
for i in range(400):
    {where}.put(i, np.full(4096, i % 256, np.uint8))
"""
SCRIPTS = {
    "engine": "engine = TransferEngine('exits', metadata=url)",
    "store": "from mooncake_serving.store import Store\nstore = Store.create(1 << 20)\n"
    + PUTS.format(where="store"),
    "tiered": TIERED + PUTS.format(where="store"),
    "cluster": "from mooncake_serving.store import Store\nstore = Store.create(1 << 20)\n"
    + NODE
    + PUTS.format(where="cluster"),
    "tiered_cluster": TIERED + NODE + PUTS.format(where="cluster"),
    "mooncake": """
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 8 << 20, 1 << 20, "tcp", "", url) == 0
assert store.put("a", b"1") == 0
""",
    "mooncake_engine": """
from mooncake_serving.compat.mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:0", url, "tcp", "") == 0
""",
}


@pytest.mark.parametrize("how", SCRIPTS)
def test_process_exits_cleanly_without_close(shared_redis, tmp_path, how):
    script = ENDING.format(made=SCRIPTS[how], url=shared_redis.url, folder=str(tmp_path))
    assert run_fork(script) == (0, "")
    with connect(shared_redis.url) as servers:
        assert servers.members() == []
