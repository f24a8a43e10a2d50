"""New processes that find torch imported already, which takes each of them a second or more."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def new_processes() -> ForkServerContext:
    """Processes of a server that has imported the package, and has no other thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mooncake_kernels"])
    return context
