"""A process that has no file descriptor or thread left: errors say so, and nothing ends it."""

import pytest

from .scripts import run_script

SCARCE = """
import ctypes, resource
from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
libc = ctypes.CDLL(None)
usual, huge = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
for attributes in usual, huge: libc.pthread_getattr_default_np(attributes)
libc.pthread_attr_setstacksize(huge, ctypes.c_size_t(1 << 47))

def use_all_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    used = []
    try:
        while True: used.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: return used

def use_all_threads():  # the next one's stack fits nowhere
    libc.pthread_setattr_default_np(huge)

def free_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    libc.pthread_setattr_default_np(usual)

def check_fails(cause, call):
    try: call()
    except TransferError as error: assert cause in str(error), error
    else: raise AssertionError(cause)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_requests_work_without_free_descriptors(transport):
    run_script(
        SCARCE
        + f"""
b.serve(ObjectPool.create(1 << 20), may_write=True)
with TransferEngine(transports=["{transport}"]) as engine, engine.open(b.name) as peer:
    region = engine.register(np.ones(100, np.uint8))
    use_all_descriptors()
    for call in (
        lambda: engine.read_objects(peer, [(1, 7)]),
        lambda: engine.write_objects(peer, [(1, 7)], [[(region.address, 100)]]),
        lambda: engine.regions(peer),
        lambda: engine.explain_path(region, peer, far.address),
    ):
        check_fails("Too many open files", call)
    free_all()
    engine.write(peer, [(region.address, far.address, 100)]).wait()
    engine.explain_path(region, peer, far.address)
    assert engine.write_objects(peer, [(1, 7)], [[(region.address, 100)]]) == [1]
"""
    )


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_open_fails_cleanly_without_descriptors_or_threads(what, tmp_path):
    cause = {"descriptors": "Too many open files", "threads": "no thread can be started"}[what]
    (tmp_path / "file").touch()
    run_script(
        SCARCE
        + f"""
names = dict.fromkeys(["local", "shm", "tcp"], b.name) | {{"file": "file:{tmp_path}/file"}}
engines = {{transport: TransferEngine(transports=[transport]) for transport in names}}
use_all_{what}()
try: TransferEngine(transports=["tcp"])
except OSError as error: assert "{cause}" in str(error), error
else: raise AssertionError("an engine without {what}")
for transport, name in names.items():
    check_fails("{cause}", lambda: engines[transport].open(name))
free_all()
for transport, name in names.items():
    assert engines[transport].open(name).transport == transport
    engines[transport].close()
"""
    )


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_open_with_few_descriptors(transport):
    """Those that a connection over shm receives may be the first for which there is no room."""
    run_script(
        SCARCE
        + f"""
import subprocess, sys
PEER = "import mooncake_kernels as mk; e = mk.TransferEngine(); print(e.name, flush=True); input()"
far_process = subprocess.Popen(
    [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
name = far_process.stdout.readline().strip()
engine = TransferEngine(transports=["{transport}"])
used = use_all_descriptors()
for num_free in range(12):
    try: engine.open(name).close()
    except TransferError as error: assert "Too many open files" in str(error), (num_free, error)
    else: assert num_free > 0
    os.close(used.pop())
engine.open(name).close()
free_all()
engine.close()
far_process.communicate("\\n")
"""
    )


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_close_without_free_descriptors(transport):
    run_script(
        SCARCE
        + f"""
engine = TransferEngine(transports=["{transport}"])
with engine, engine.open(b.name) as peer:
    region = engine.register(np.ones(4096, np.uint8))
    engine.write(peer, [(region.address, far.address, 4096)]).wait()
    use_all_descriptors()
b.close()
"""
    )


def test_engine_survives_strangers_without_free_descriptors():
    """Others take the descriptors that the end of a stranger's session frees."""
    run_script(
        SCARCE
        + """
import socket, time
strangers = [socket.socket() for _ in range(40)]
host, port = b.name.split(":")
used, is_over = use_all_descriptors(), threading.Event()
def take_what_is_freed():
    while not is_over.is_set():
        try: used.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: pass
for num_free, stranger in enumerate(strangers):
    is_over.clear()
    for fd in used[:num_free % 8]: os.close(fd)
    del used[:num_free % 8]
    stranger.connect((host, int(port)))
    time.sleep(0.02)  # the engine takes what it needs
    taker = threading.Thread(target=take_what_is_freed); taker.start()
    time.sleep(0.01)
    stranger.shutdown(socket.SHUT_RDWR)
    time.sleep(0.02)
    is_over.set(); taker.join()
free_all()
a.write(peer, [row]).wait()
"""
    )
