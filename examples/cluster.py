"""A store over several hosts: put on one, read on the other, copy, drain.

Both hosts are in this process, and the directory is a Python object; in a cluster it is Redis:
``directory.connect("redis://10.0.0.1:6379/0", cluster="llama")``.
"""

from contextlib import ExitStack

import numpy as np

import mooncake_kernels as mk
from mooncake_serving.store import ClusterStore, Node, Replicator, Store, drain
from mooncake_serving.store.directory import EmbeddedDirectory

keys = mk.block_hashes(np.arange(1024), 256)
with ExitStack() as stack:
    directory = EmbeddedDirectory()
    hosts = []
    for _ in range(2):
        store = stack.enter_context(Store.create(16 << 20, namespace="llama"))
        engine = stack.enter_context(mk.TransferEngine(transports=["tcp"]))
        node = stack.enter_context(Node(store, engine, directory))
        hosts.append((node, ClusterStore(node)))
    (node, here), (_, there) = hosts

    here.put_each(keys, [bytes([i]) * 65536 for i in range(4)])  # into its own pool
    assert there.match_prefix(keys) == 4  # the directory knows
    buffers = [np.empty(65536, np.uint8) for _ in keys]
    there.get_into_each(keys, buffers)  # over tcp; its own pool stays as it is
    assert [int(buffer[0]) for buffer in buffers] == [0, 1, 2, 3]

    print(Replicator(here).replicate(keys, 2))  # now the other host has them as well
    print(drain(node))  # moves what only this node has, and closes it
    assert there.match_prefix(keys) == 4
