"""Objects of other processes, which are killed, stopped and restarted."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine

from ..stopping import stop
from .objects import DONE, LARGE, content, key, keys, place, read, serving
from .support import START_S, WAIT_S, eventually


@contextlib.contextmanager
def process(target, *arguments):
    """A process that runs ``target(pipe, ...)``; our end of the pipe, and its pid."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours, child.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        child.join(WAIT_S)
        ours.close()


def hold(pipe, name: str | None) -> None:
    """Serve a pool in which is object 1, large, and 2."""
    pool = ObjectPool.create(2 * LARGE)
    pool.put_from(key(1), content(1, LARGE))
    pool.put_from(key(2), content(2, 1000))
    engine = TransferEngine(name)
    engine.serve(pool, may_write=True)
    pipe.send((engine.name, pool.path))
    pipe.recv()


def serve_file(pipe, path: str) -> None:
    """Serve a pool that is another process's, too."""
    engine = TransferEngine()
    engine.serve(ObjectPool.open(path), may_write=True)
    pipe.send(engine.name)
    pipe.recv()


def pause(pipe, name: str, transport: str) -> None:
    """Ask for object 1, and take the first of it."""
    engine = TransferEngine(transports=[transport])
    reply = engine.read_objects(engine.open(name), keys(1))
    pipe.send(reply.statuses.tolist())
    pipe.recv()


def write_for_ever(pipe, name: str, transport: str) -> None:
    engine = TransferEngine(transports=[transport])
    peer = engine.open(name)
    number = 0
    while True:
        data = content(number, (3 << 20) + number)
        engine.write_objects(peer, keys(number), [place(data)])
        if number >= 3:
            engine.remove_objects(peer, keys(number - 3))
        pipe.send(number)
        number += 1


def told(pipe):
    assert pipe.poll(START_S), "the process says nothing"
    return pipe.recv()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_objects_of_another_process(transport):
    with process(hold, None) as (pipe, _), TransferEngine(transports=[transport]) as near:
        name, path = told(pipe)
        pool = ObjectPool.open(path)
        with near.open(name) as peer:
            expected = [content(1, LARGE).tobytes(), content(2, 1000).tobytes()]
            assert read(near, peer, keys(1, 2)) == expected
            data = content(3, 1 << 20)
            assert near.write_objects(peer, keys(3), [place(data)]).tolist() == [DONE]
            with pool.pin(key(3)) as pin:
                assert bytes(pin.view) == data.tobytes()
            assert near.remove_objects(peer, keys(3)).tolist() == [DONE]
            assert not pool.contains(key(3))
            reply = near.read_objects(peer, keys(1))
            assert pool.stats().num_pins == 1
            reply.close()
            eventually(lambda: pool.stats().num_pins == 0)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_killed_reader_releases_its_pins(transport):
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        with process(pause, here.far.name, transport) as (pipe, pid):
            assert told(pipe) == [DONE]
            assert here.pool.stats().num_pins == 1
            assert here.pool.remove(key(1))
            os.kill(pid, signal.SIGKILL)
            eventually(here.is_at_rest)
            assert here.pool.stats().num_doomed == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01])
def test_killed_writer_leaves_no_partial_object(transport, after_s):
    with serving(LARGE, pool={"alignment": 64}) as here:
        with process(write_for_ever, here.far.name, transport) as (pipe, pid):
            while told(pipe) < 3:
                pass
            time.sleep(after_s)
            os.kill(pid, signal.SIGKILL)
            eventually(here.is_at_rest)
            there = {number: data for number in range(1000) if (data := here.stored(number))}
            assert 2 <= len(there) <= 4
            for number, data in there.items():
                assert data == content(number, (3 << 20) + number).tobytes()


def is_dead(pid: int) -> bool:
    """Whether it has ended, also if no one has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_server_is_killed_and_restarted(transport):
    with TransferEngine(transports=[transport]) as near:
        with process(hold, None) as (pipe, pid):
            name, _ = told(pipe)
            peer = near.open(name)
            with near.read_objects(peer, keys(1)) as reply:
                os.kill(pid, signal.SIGKILL)
                eventually(lambda: is_dead(pid))  # or it may send all of it
                with pytest.raises(TransferError, match="connection closed by peer"):
                    reply.receive([[]], verify=True)
            with pytest.raises(TransferError, match="connection (refused|closed by peer)"):
                near.read_objects(peer, keys(2))  # it may be dying still
        with process(hold, name) as (pipe, _):
            told(pipe)
            for _ in range(2):
                with pytest.raises(TransferError, match="the peer was restarted; open it again"):
                    near.read_objects(peer, keys(2))
            with near.open(name) as again:
                assert read(near, again, keys(2)) == [content(2, 1000).tobytes()]


@pytest.mark.parametrize("was_asked", [True, False])
def test_stopped_server_times_out_and_recovers(was_asked):
    """It accepts, and does not answer."""
    with process(hold, None) as (pipe, pid), TransferEngine(transports=["tcp"]) as near:
        name, _ = told(pipe)
        peer = near.open(name)
        if was_asked:
            assert read(near, peer, keys(2)) == [content(2, 1000).tobytes()]
        stop(pid)
        data = content(3, LARGE)
        for ask in (
            lambda: near.read_objects(peer, keys(2), deadline_s=0.3),
            lambda: near.remove_objects(peer, keys(2), deadline_s=0.3),
            lambda: near.write_objects(peer, keys(3), [place(data)], deadline_s=0.3),
        ):
            with pytest.raises(TransferError) as caught:
                ask()
            assert caught.value.timed_out and caught.value.cause == "deadline of 0.3 s passed"
        os.kill(pid, signal.SIGCONT)
        statuses = near.write_objects(peer, keys(4), [place(data[:100])])
        assert statuses.tolist() == [DONE]
        assert read(near, peer, keys(4)) == [data[:100].tobytes()]
        paths = near.stats()["peers"][name]
        assert paths["num_in_flight"] == 0 and paths["num_errors"] == 3


def write_and_remove(name: str, first: int) -> None:
    """Until the peer has gone."""
    data = content(first, 512)
    many = keys(*range(first, first + 1024))
    with contextlib.suppress(TransferError), TransferEngine(transports=["shm"]) as engine:
        with engine.open(name) as peer:
            while True:
                engine.write_objects(peer, many, [place(data)] * len(many))
                engine.remove_objects(peer, many)


def test_server_is_killed_while_it_holds_the_pool(tmp_path):
    """The pool's mutex is robust, also in a thread that shows its peer a sign of life."""
    path = str(tmp_path / "pool")
    data = content(0, 512)
    with ObjectPool.create(64 << 20, path=path) as pool, process(serve_file, path) as (pipe, pid):
        assert pipe.poll(START_S)
        name = pipe.recv()
        writers = [
            threading.Thread(target=write_and_remove, args=(name, 10_000 * i)) for i in (1, 2, 3)
        ]
        for writer in writers:
            writer.start()
        held, failures = False, []

        def put(number: int) -> None:
            try:
                pool.put_from(key(number), data)
            except OSError as error:
                failures.append(str(error))

        for number in range(3000):
            time.sleep(random.uniform(0, 0.005))
            stop(pid)
            waiting = threading.Thread(target=put, args=(number,))
            waiting.start()
            waiting.join(0.3)
            held = waiting.is_alive()
            os.kill(pid, signal.SIGKILL if held else signal.SIGCONT)
            waiting.join(WAIT_S)
            if held:
                break
        else:
            os.kill(pid, signal.SIGKILL)
        for writer in writers:
            writer.join(WAIT_S)
        if not held:
            pytest.skip("it was never stopped while it held the pool")
        assert failures == []
