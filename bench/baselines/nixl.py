"""An agent of NIXL's API, as engines use it: lists prepared once, a transfer made by index.

The side of a process of ``baselines.transfer``, for both libraries that have that API.
"""

import importlib
import os
from typing import Any

import numpy as np

PACKAGES = {"compat": "mooncake_serving.compat.nixl", "wheel": "nixl"}


class Prepared:
    """NIXL's wheel or this project's package; ``"wheel:tcp"``: over what UCX_TLS says.

    Args:
        memory: uint8, registered whole.
        option: a package and a value of UCX_TLS.
    """

    def __init__(self, memory: np.ndarray, option: str):
        package, _, os.environ["UCX_TLS"] = option.partition(":")
        if os.environ["UCX_TLS"].startswith("tcp"):
            os.environ["UCX_NET_DEVICES"] = "lo"
        api = importlib.import_module(f"{PACKAGES[package]}._api")
        config = api.nixl_agent_config(backends=["UCX"])
        self.agent = api.nixl_agent(f"bench-{os.getpid()}", config)
        self.address = memory.ctypes.data
        self.agent.register_memory([(self.address, memory.nbytes, 0, "")], "DRAM")
        self.lists: dict[tuple[int, int, int], Any] = {}

    def offer(self) -> Any:
        return self.agent.get_agent_metadata(), self.address

    def attach(self, offered: Any) -> None:
        metadata, self.remote = offered
        self.peer = self.agent.add_remote_agent(metadata)

    def prepare(self, job: Any) -> Any:
        """The lists of all blocks of that size at either end, and indices into them."""
        size, first = job.size, int(min(job.local.min(), job.remote.min())) // job.size * job.size
        count = int(max(job.local.max(), job.remote.max()) - first) // size + 1
        key = (size, first, count)
        if key not in self.lists:
            rows = np.zeros((2, count, 3), np.uint64)
            rows[:, :, 0] = first + np.arange(count) * size
            rows[0, :, 0] += np.uint64(self.address)
            rows[1, :, 0] += np.uint64(self.remote)
            rows[:, :, 1] = size
            names = ("NIXL_INIT_AGENT", self.peer)
            self.lists[key] = [
                self.agent.prep_xfer_dlist(name, part, "DRAM")
                for name, part in zip(names, rows, strict=True)
            ]
        indices = [((at - first) // size).astype(np.int32) for at in (job.local, job.remote)]
        return job.verb.upper(), *self.lists[key], *indices

    def move(self, prepared: Any) -> None:
        verb, local, remote, here, there = prepared
        handle = self.agent.make_prepped_xfer(verb, local, here, remote, there)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", "the transfer has failed"
        self.agent.release_xfer_handle(handle)
