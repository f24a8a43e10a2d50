"""Functions called in a process that has not used CUDA."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from ..transfer.support import START_S


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what it returns there, or raise what it raises."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mooncake_kernels.transfer"])
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(function, *arguments).result(START_S)
