"""``python -m mooncake_serving demo``."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from typing import TextIO

import httpx
import torch

from mooncake_serving.engine import find_model
from mooncake_serving.serve.cluster import LocalCluster, StartFailed
from mooncake_serving.serve.up import signals_as_ctrl_c, stay

from .alone import Alone
from .screen import Screen
from .tour import OBJECTIVES_S, Running, Tour, class_of

ENGINES = {f"{role}-{i}": role for role in ("prefill", "decode") for i in range(2)}
BLOCK_SIZE, NUM_BLOCKS = 16, 256


def run(options: argparse.Namespace) -> int:
    """Run the demo; returns 1 if the tokens are not those of a single process.

    Raises:
        ModelNotFound, InvalidModel, UnsupportedModel, InvalidArgument: see ``load_model``.
        StartFailed: a server has ended before the cluster was ready.
        ConnectionError: a server has failed later.
    """
    find_model(options.model)  # fail before any process is started
    signals_as_ctrl_c()
    with tempfile.TemporaryFile("w+") as told:
        try:
            return _demo(options, told)
        except (StartFailed, httpx.HTTPError) as error:
            told.seek(0)
            sys.stderr.write(told.read())
            if isinstance(error, StartFailed):
                raise
            raise ConnectionError(f"demo: a server has failed: {error}") from None


def _demo(options: argparse.Namespace, told: TextIO) -> int:
    """Run it; ``told`` is where servers say what they do."""
    screen = Screen(sys.stdout)
    threads = max(1, len(os.sched_getaffinity(0)) // len(ENGINES))
    torch.set_num_threads(threads)
    arguments = [
        f"--device={options.device}", f"--threads={threads}", f"--num-blocks={NUM_BLOCKS}",
        f"--block-size={BLOCK_SIZE}", "--batch-invariant",
    ]  # fmt: skip
    if options.model is not None:
        arguments.append(f"--model={options.model}")
    screen.head("A cluster: two engines that prefill, two that decode, a router before them")
    with LocalCluster(
        ENGINES,
        dict.fromkeys(ENGINES.values(), arguments),
        host="127.0.0.1",
        port=0,
        block_size=BLOCK_SIZE,
        output=told,
        admission={"classes": {class_of(one): {"ttft_s": one} for one in OBJECTIVES_S}},
    ) as cluster:
        began = time.monotonic()
        screen.say("Five processes start, and each engine loads the model ...")
        alone = Alone(options.model, options.device, BLOCK_SIZE)
        cluster.wait_until_ready()
        model = cluster.model()
        screen.say(
            f"Ready after {time.monotonic() - began:.0f} s. While this runs, {cluster.url} serves "
            f"{model} by the OpenAI API, and to browsers a page: a chat, engines, every decision."
        )
        events = {name: cluster.event_endpoints(name) for name in ENGINES}
        is_same = Tour(Running(cluster.url, model, BLOCK_SIZE, events), alone, screen).show()
        if options.stay:
            screen.head(f"It stays up until Ctrl-C. The page: {cluster.url}")
            with contextlib.suppress(KeyboardInterrupt):
                stay(cluster)
        else:
            screen.head("To chat with it yourself: make serve, or make demo DEMO=--stay")
    return 0 if is_same else 1
