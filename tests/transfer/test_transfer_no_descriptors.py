"""A process that has no file descriptor left: errors say so, and nothing ends the process."""

import pytest

from .scripts import run_script

USE_ALL = """
import resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
def use_all_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    used = []
    try:
        while True: used.append(os.open("/dev/null", os.O_RDONLY))
    except OSError: return used
"""


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_peer_and_its_engine_close(transport):
    run_script(
        USE_ALL
        + f"""
engine = TransferEngine(transports=["{transport}"])
with engine, engine.open(b.name) as peer:
    region = engine.register(np.ones(4096, np.uint8))
    engine.write(peer, [(region.address, far.address, 4096)]).wait()
    use_all_descriptors()
b.close()
"""
    )


def test_strangers_who_come_and_go_leave_an_engine_alone():
    run_script(
        USE_ALL
        + """
import socket, time
strangers = [socket.socket() for _ in range(8)]
host, port = b.name.split(":")
used = use_all_descriptors()
for num_free, stranger in enumerate(strangers):
    for fd in used[:num_free]: os.close(fd)
    del used[:num_free]
    stranger.connect((host, int(port)))
    time.sleep(0.05)  # the engine takes what it needs
    used += use_all_descriptors()
    stranger.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
a.write(peer, [row]).wait()
"""
    )
