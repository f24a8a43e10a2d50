"""``serve engine``: one engine as an OpenAI server."""

import argparse
import logging
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.http_server import in_url, is_loopback, listen, silence_uvicorn
from mooncake_serving.engine import Engine, Llama, PagedKVCache, find_model, load_model
from mooncake_serving.engine.batching import OnStep
from mooncake_serving.engine.caching_allocator import (
    CachingAllocator,
    DroppedBlocks,
    KeptBlocks,
)
from mooncake_serving.engine.pipeline import GroupOptions, PipelinedEngine, StageGroup
from mooncake_serving.http_api import make_server, raise_file_limit
from mooncake_serving.store.events import EventPublisher

from .announcement import Announcement
from .app import CLIENT_S, make_app
from .calls import Served
from .children import default_threads, end_with_stdin
from .events import event_of
from .model_digest import model_digest
from .options import check_semantic
from .similar_prompts import SimilarPrompts
from .stored_blocks import StoredBlocks
from .transfers import Transfers
from .worker import Parts, Worker


def run(options: argparse.Namespace) -> int:
    """Serve until the process is told to end; returns the exit status.

    Raises:
        InvalidArgument: options contradict each other, or see ``load`` and ``make_engine``.
    """
    if options.role == "decode" and options.pipeline > 1:
        raise InvalidArgument(
            f"serve engine: --pipeline must be 1 with --role decode, got {options.pipeline}"
        )
    if options.role == "decode" and options.semantic_blocks:
        raise InvalidArgument(
            "serve engine: --semantic-blocks must be 0 with --role decode, which computes no "
            f"prompts, got {options.semantic_blocks}"
        )
    check_semantic("serve engine", options)
    if options.replay and not options.events:
        raise InvalidArgument(
            f"serve engine: --replay must be left out without --events, got {options.replay!r}"
        )
    if options.admin_key_file and not options.register:
        raise InvalidArgument(
            "serve engine: --admin-key-file must be left out without --register, got "
            f"{options.admin_key_file!r}"
        )
    announcement = Announcement(options) if options.register else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("mooncake_kernels").setLevel(logging.WARNING)  # which kernel, which way
    if options.until_stdin_closes:
        end_with_stdin()
    options.threads = options.threads or default_threads(options.pipeline)
    torch.set_num_threads(options.threads)
    with _listening(options) as listening, _publisher(options) as publisher:
        model, served = load(options)
        failed = False

        def fail() -> None:
            nonlocal failed
            failed = server.should_exit = True

        silence_uvicorn()
        raise_file_limit()
        worker = Worker(partial(make_engine, options, model, publisher), options.max_waiting)
        del model  # a pipeline keeps a part of it
        app = make_app(served, worker, fail)
        address = listening.getsockname()
        url = f"http://{in_url(address[0])}:{address[1]}"
        if announcement is not None:
            host = in_url(announcement.host)
            announcement.add_to(app, f"{host}:{address[1]}", **_endpoints(publisher, host))
        server = make_server(app, listening, CLIENT_S)
        sys.stdout.write(f"engine: {url} serves {served.name}\n")
        sys.stdout.flush()
        if not is_loopback(address):
            logging.warning("whoever reaches %s may use it: there are no keys", url)
        server.run(sockets=[listening])
    return 1 if failed else 0


def _endpoints(publisher: EventPublisher | None, host: str) -> dict[str, str]:
    """The endpoints of KV events as others connect to them."""
    if publisher is None:
        return {}
    told = {"events": publisher.endpoint, "replay": publisher.replay_endpoint or ""}
    any_host = r"//(\*|0\.0\.0\.0|\[::\]):"
    return {
        name: re.sub(any_host, f"//{host}:", endpoint)
        for name, endpoint in told.items()
        if endpoint
    }


def load(options: argparse.Namespace) -> tuple[Llama, Served]:
    """Load the model, and say what is served of it.

    Raises:
        ModelNotFound, InvalidModel, UnsupportedModel, InvalidArgument: see ``load_model``.
    """
    path = find_model(options.model)
    model, tokenizer = load_model(
        path,
        dtype=getattr(torch, options.dtype),
        device=options.device,
        batch_invariant=options.batch_invariant,
    )
    if tokenizer.vocab_size > model.config.vocab_size:
        logging.warning(
            "the tokenizer has %d tokens and the model %d: prompts with other tokens are refused",
            tokenizer.vocab_size,
            model.config.vocab_size,
        )
    served = Served(
        options.name or (path.stem if path.is_file() else path.resolve().name),
        tokenizer,
        model.config.vocab_size,
        min(model.config.max_position, options.num_blocks * options.block_size),
        sends=options.role == "prefill",
        receives=options.role == "decode",
        is_semantic=options.semantic_blocks > 0,
    )
    return model, served


def make_engine(
    options: argparse.Namespace,
    model: Llama,
    publisher: EventPublisher | None,
    on_step: OnStep,
) -> Parts:
    """Make an engine of the options, what hands its prompts over, and a store behind its cache.

    Args:
        options: of the command.
        model: the model.
        publisher: of its KV events; None: there is none.
        on_step: see ``BatchingEngine``.
    """
    # It takes a while, and tells other engines and the store which model this is.
    digest = model_digest(model) if options.store or options.role != "both" else ""
    engine, group = _engine(options, model, on_step)
    stored = StoredBlocks(options.store, digest, engine) if options.store else None
    similar = SimilarPrompts(engine, options.semantic_blocks) if options.semantic_blocks else None

    def changed(change: KeptBlocks | DroppedBlocks) -> None:
        if publisher is not None:
            publisher.publish_events(event_of(change, options.block_size))
        if stored is not None:
            stored.changed(change)

    assert isinstance(engine.allocator, CachingAllocator), "it keeps prefixes"
    engine.allocator.on_change = changed
    if options.role == "both":
        return Parts(engine, None, stored, similar, group)
    transfer = mk.TransferEngine(f"{in_url(options.handoff_host or options.host)}:0")
    is_prefill = options.role == "prefill"
    transfers = Transfers(engine, transfer, sends=is_prefill, receives=not is_prefill, model=digest)
    return Parts(engine, transfers, stored, similar, group)


def _engine(
    options: argparse.Namespace, model: Llama, on_step: OnStep
) -> tuple[Engine, StageGroup | None]:
    """Make an engine, in this process or as a group of stages."""
    max_batch_tokens = max(512, options.max_requests)  # a token of each
    group: StageGroup | None = None
    make: Callable[..., Engine]
    if options.pipeline > 1:
        stages = GroupOptions(
            str(find_model(options.model)),
            options.pipeline,
            options.num_blocks,
            options.block_size,
            max_batch_tokens,
            options.batch_invariant,
            options.threads,
        )
        group = StageGroup(model, stages)
        make = partial(PipelinedEngine, group)
    else:
        cache = PagedKVCache(
            model.config,
            options.num_blocks,
            block_size=options.block_size,
            dtype=model.dtype,
            device=options.device,
        )
        make = partial(Engine, model, cache, max_batch_tokens=max_batch_tokens)
    engine = make(
        chunk_tokens=options.chunk_tokens,
        max_requests=options.max_requests,
        keep_prefixes=True,
        on_step=on_step,
    )
    return engine, group


@contextmanager
def _listening(options: argparse.Namespace) -> Iterator[socket.socket]:
    """Take the port before the model is loaded, which takes long."""
    if options.fd is None:
        listening = listen("serve engine", options.host, options.port)
    else:
        listening = socket.socket(fileno=options.fd)
    with listening:
        yield listening


@contextmanager
def _publisher(options: argparse.Namespace) -> Iterator[EventPublisher | None]:
    if not options.events:
        yield None
        return
    replay = options.replay or None
    with EventPublisher(options.events, replay_endpoint=replay) as publisher:
        yield publisher
