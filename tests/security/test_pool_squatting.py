"""A pool's path is taken by another user before, or while, this one uses it."""

import contextlib
import os
import shutil
import socket
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.compat.mooncake import MooncakeDistributedStore
from mooncake_serving.compat.mooncake.store import settings as default
from mooncake_serving.store import SsdTier, Store

OTHER = 65_534
FRESH = 61_234  # has never had a pool
SECRET = b"SECRET PROMPT"
BYTES = 1 << 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="two users need root")


@pytest.fixture
def shared(tmp_path_factory) -> Iterator[Path]:
    """A folder in memory where anyone may make files, and delete their own, as in /dev/shm."""
    folder = Path(f"/dev/shm/mk-test-{os.getpid()}-{tmp_path_factory.mktemp('shm').name}")
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_user(user: int, act: Callable[[], object]) -> None:
    """Do this as another user, in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            act()
        except BaseException:  # noqa: BLE001 - the child must not return
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def make_pool(path: Path, mode: int) -> None:
    ObjectPool.create(BYTES, path).close()
    path.chmod(mode)


def refused(path: Path, why: str, **trust) -> None:
    """The path is refused, and nothing is written to what it is, or leads to."""
    before = path.read_bytes() if path.is_file() else b""
    for call in (ObjectPool.open, Store.open):
        with pytest.raises(InvalidArgument, match=f"^ObjectPool.open: path must be .*{why}"):
            call(path, **trust)
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", BYTES, BYTES, "tcp", "", str(path)) != 0
    assert store.put("prompt", SECRET) != 0
    assert (path.read_bytes() if path.is_file() else b"") == before


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_pool_of_another_user_is_rejected(shared, mode):
    path = shared / "kv"
    as_user(OTHER, lambda: make_pool(path, mode))
    refused(path, f"a file of user 0 .*, got {path} of user {OTHER}")


@pytest.mark.parametrize("mode, why", [(0o666, "everyone"), (0o606, "everyone"), (0o660, "owner")])
def test_pool_writable_by_others_is_rejected(shared, mode, why):
    path = shared / "kv"
    make_pool(path, mode)
    refused(path, f"{why} can write.*, got {path} with mode 0{mode:o}")


def test_symlink_is_rejected(shared):
    make_pool(shared / "real", 0o600)
    (shared / "kv").symlink_to(shared / "real")
    refused(shared / "kv", "which is a link")


@needs_root
def test_symlink_planted_by_another_user_is_rejected(shared):
    (shared / "victim").write_bytes(bytes(8 << 20))
    as_user(OTHER, lambda: (shared / "kv").symlink_to(shared / "victim"))
    refused(shared / "kv", "which is a link")
    with pytest.raises(FileExistsError):
        ObjectPool.create(BYTES, shared / "kv")
    as_user(OTHER, lambda: (shared / "none").symlink_to(shared / "nowhere"))
    with pytest.raises(FileExistsError):
        ObjectPool.create(BYTES, shared / "none")
    assert not (shared / "nowhere").exists()


def test_hard_link_is_rejected(shared):
    make_pool(shared / "real", 0o600)
    (shared / "kv").hardlink_to(shared / "real")
    refused(shared / "kv", "one of 2 \\(hard links\\)")


@needs_root
def test_hard_link_to_another_users_pool_is_rejected(shared):
    as_user(OTHER, lambda: make_pool(shared / "real", 0o666))
    (shared / "kv").hardlink_to(shared / "real")
    refused(shared / "kv", f"of user {OTHER}")


def test_non_regular_files_are_rejected(shared):
    os.mkfifo(shared / "fifo")
    refused(shared / "fifo", "which is a FIFO")
    (shared / "folder").mkdir()
    refused(shared / "folder", "which is a folder")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(shared / "socket"))
        refused(shared / "socket", "which is a socket")
    refused(Path("/dev/zero"), "which is a device")


@needs_root
def test_fifo_or_folder_of_another_user_is_rejected(shared):
    as_user(OTHER, lambda: os.mkfifo(shared / "fifo", 0o666))
    refused(shared / "fifo", "which is a FIFO")
    as_user(OTHER, lambda: (shared / "folder").mkdir())
    refused(shared / "folder", "which is a folder")


@needs_root
def test_pool_file_is_private_to_its_user(shared):
    before = os.umask(0)
    try:
        pool = ObjectPool.create(BYTES, shared / "kv")
    finally:
        os.umask(before)
    pool.put_from((1, 1), SECRET)
    assert stat.S_IMODE(os.stat(pool.path).st_mode) == 0o600

    def read():
        with pytest.raises(PermissionError):
            Path(pool.path).read_bytes()
        with pytest.raises(PermissionError):
            ObjectPool.open(pool.path, owner=0)

    as_user(OTHER, read)
    with ObjectPool.create(BYTES) as nameless:
        assert stat.S_IMODE(os.stat(nameless.path).st_mode) == 0o600


@needs_root
def test_pool_can_be_shared_with_a_group(shared):
    path = shared / "kv"
    pool = ObjectPool.create(BYTES, path, group=OTHER)
    about = path.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (0, OTHER, 0o660)

    def use():
        refused(path, f"a file of user {OTHER}")
        refused(path, "only its owner can write, unless group", owner=0)
        refused(path, "a file of user", group=OTHER)
        with Store.open(path, owner="root", group=OTHER) as store:
            assert store.put("theirs", SECRET) is PutResult.STORED

    as_user(OTHER, use)
    refused(path, "unless group is given")
    refused(path, f"only group 1 can write, got {path} of group {OTHER}", group=1)
    with Store.open(path, group=OTHER) as store:
        assert store.get("theirs") == SECRET
    path.chmod(0o666)
    refused(path, "not everyone can write", group=OTHER)
    pool.close()


@needs_root
def test_root_opens_pool_of_named_owner(shared):
    as_user(OTHER, lambda: make_pool(shared / "kv", 0o600))
    with ObjectPool.open(shared / "kv", owner=OTHER) as pool:
        assert pool.stats().num_ready == 0


@pytest.mark.parametrize("name", ["owner", "group"])
def test_owner_and_group_must_exist(shared, name):
    make_pool(shared / "kv", 0o600)
    for value in ("no-such-name", -1, 1.5):
        with pytest.raises(InvalidArgument, match=f"^ObjectPool.open: {name} must be an "):
            ObjectPool.open(shared / "kv", **{name: value})


def test_group_requires_a_path():
    with pytest.raises(InvalidArgument, match="^ObjectPool.create: group must be None without"):
        ObjectPool.create(BYTES, group=0)


# --- the default path -----------------------------------------------------------------------------


@pytest.fixture
def memory(shared, monkeypatch) -> Path:
    monkeypatch.setattr(default, "SHARED_MEMORY", str(shared))
    return shared


def set_up(address: str = "") -> MooncakeDistributedStore | None:
    store = MooncakeDistributedStore()
    done = store.setup("127.0.0.1", "P2PHANDSHAKE", BYTES, BYTES, "tcp", "", address)
    return store if done == 0 else None


@needs_root
def test_new_user_gets_private_default_path(memory):
    def use():
        first, second = set_up(), set_up()
        assert first.put("prompt", SECRET) == 0
        assert second.get("prompt") == SECRET
        folder = memory / f"mooncake-store-{FRESH}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "pool").stat().st_mode) == 0o600

    def use_again():
        assert set_up().get("prompt") == SECRET

    as_user(FRESH, use)
    as_user(FRESH, use_again)


def pool_in_its_place(folder: Path) -> None:
    make_pool(folder, 0o666)


def open_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    make_pool(folder / "pool", 0o666)


def private_folder(folder: Path) -> None:
    folder.mkdir(0o700)
    make_pool(folder / "pool", 0o666)


def link(folder: Path) -> None:
    open_folder(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@needs_root
@pytest.mark.parametrize("squat", [pool_in_its_place, open_folder, private_folder, link])
def test_squatted_default_path_fails_setup(memory, squat, caplog):
    folder = memory / f"mooncake-store-{os.geteuid()}"
    as_user(OTHER, lambda: squat(folder))
    assert set_up() is None
    assert f"{folder} is a folder that only user 0 can use" in caplog.text
    files = [path for path in memory.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files and not any(SECRET in path.read_bytes() for path in files)


def test_default_folder_open_to_others_fails_setup(memory, caplog):
    folder = memory / f"mooncake-store-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o770)
    assert set_up() is None
    assert "with mode 0770" in caplog.text
    folder.chmod(0o700)
    assert set_up().put("prompt", SECRET) == 0


# --- the file of a tier ---------------------------------------------------------------------------


def tier(path: Path) -> SsdTier:
    return SsdTier(path, 1 << 20, bucket_bytes=1 << 16)


@needs_root
def test_tier_file_of_another_user_is_rejected(shared):
    def make() -> None:
        (shared / "tier").write_bytes(b"")
        (shared / "tier").chmod(0o666)
        (shared / "link").symlink_to(shared / "tier")
        os.mkfifo(shared / "fifo", 0o666)

    as_user(OTHER, make)
    with pytest.raises(InvalidArgument, match=f"^SsdTier: path must be a file of user 0 .*{OTHER}"):
        tier(shared / "tier")
    for name in ("link", "fifo"):
        with pytest.raises(InvalidArgument, match="^SsdTier: path must be a regular file, got"):
            tier(shared / name)
    assert (shared / "tier").stat().st_size == 0


def test_tier_file_writable_by_others_is_rejected(shared):
    tier(shared / "tier").close()
    assert stat.S_IMODE((shared / "tier").stat().st_mode) == 0o600
    (shared / "tier").chmod(0o620)
    with pytest.raises(InvalidArgument, match="that no one else can write, got .* with mode 0620"):
        tier(shared / "tier")


def test_tier_uses_the_checked_file_when_swapped_during_open(shared, monkeypatch):
    """What moves pages opens the file that was checked, not what has its name by then."""
    path = shared / "tier"
    engine_open = TransferEngine.open

    def exchange(engine, name, **options):
        path.rename(shared / "checked")
        path.write_bytes(bytes(1 << 20))
        return engine_open(engine, name, **options)

    monkeypatch.setattr(TransferEngine, "open", exchange)
    with contextlib.closing(tier(path)):
        pass
    assert not any(path.read_bytes()) and any((shared / "checked").read_bytes())
