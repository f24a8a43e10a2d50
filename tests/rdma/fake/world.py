"""The machine that the fake libibverbs shows, and how tests control and inspect it (control.h)."""

import ctypes
import gc
import ipaddress
from contextlib import contextmanager

from .build import build_verbs

KINDS = ("context", "protection domain", "region", "channel", "completion queue", "queue pair")
PORT_STATES = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}
LINK_LAYERS = {"InfiniBand": 1, "Ethernet": 2}
GID_TYPES = {"IB": 0, "RoCE v1": 1, "RoCE v2": 2}
STATUSES = {"local protection error": 4, "remote access error": 10}
EVENTS = {"QP_FATAL": 1, "QP_ACCESS_ERR": 3, "DEVICE_FATAL": 8, "PORT_ACTIVE": 9, "PORT_ERR": 10}
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, RELAXED_ORDERING = 1, 2, 4, 1 << 20  # of verbs


class World:
    """Four NICs, fake0 to fake3, that a test may change."""

    def __init__(self, *flags: str):
        self.path = build_verbs(*flags)
        # What is loaded by that name is what dlopen() finds, also where there is a real one.
        self.library = ctypes.CDLL(str(self.path), ctypes.RTLD_GLOBAL)
        for name in ("fake_count_live", "fake_count_calls", "fake_count_entries"):
            getattr(self.library, name).restype = ctypes.c_int64
        self.reset()

    def reset(self, num_devices: int = 4) -> None:
        self.library.fake_reset(num_devices)

    def set_device(self, index: int = 0, **fields: int) -> None:
        for name, value in fields.items():
            assert self.library.fake_set_device(index, name.encode(), ctypes.c_uint64(value)), name

    def set_port(self, index: int = 0, port: int = 1, **fields: int | str) -> None:
        words = PORT_STATES | LINK_LAYERS
        for name, value in fields.items():
            number = ctypes.c_uint64(words.get(value, value))
            assert self.library.fake_set_port(index, port, name.encode(), number), name

    def add_port(self, index: int = 0) -> None:
        self.library.fake_add_port(index)

    def set_gid(self, place: int, gid: str, kind: str, *, index: int = 0, port: int = 1) -> None:
        raw = ipaddress.IPv6Address(gid).packed
        self.library.fake_set_gid(index, port, place, raw, GID_TYPES[kind], 7)

    def set_option(self, name: str, value: int) -> None:
        self.library.fake_set_option(name.encode(), ctypes.c_int64(value))

    def fail(self, verb: str, error: int, *, device: str = "", skip: int = 0, count: int = 1):
        """`count` calls of a verb fail after `skip` more; the first matching rule applies."""
        self._add_rule(verb, device, skip, count, error, 0, 0)

    def delay(self, verb: str, microseconds: int, *, count: int = 1 << 30) -> None:
        self._add_rule(verb, "", 0, count, 0, microseconds, 0)

    def meet(self, verb: str, together: int) -> None:
        """Each of the next calls waits until so many are inside; it fails if that never is."""
        self._add_rule(verb, "", 0, together, 0, 0, together)

    def _add_rule(self, verb, device, *numbers: int) -> None:
        self.library.fake_add_rule(verb.encode(), device.encode(), *numbers)

    def fail_work(self, status: str, skip: int = 0) -> None:
        """A work request ends with that status, after `skip` others."""
        self.library.fake_fail_work(skip, STATUSES[status])

    def reset_rules(self) -> None:
        """From now on nothing fails or waits."""
        self.library.fake_clear_rules()

    @contextmanager
    def held(self):
        """Work requests wait; the rest run at the end. Yields a function that lets n run."""
        self.library.fake_set_budget(ctypes.c_int64(0))
        try:
            yield lambda n: self.library.fake_set_budget(ctypes.c_int64(n))
        finally:
            self.library.fake_set_budget(ctypes.c_int64(-1))

    def inject(self, event: str, device: str = "fake0", *, port: int = 0, qp_num: int = 0) -> None:
        self.library.fake_inject_event(device.encode(), EVENTS[event], port, qp_num)

    def calls(self, verb: str) -> int:
        return self.library.fake_count_calls(verb.encode())

    def forget(self, kind: str) -> None:
        """Live handles of that kind will not be released."""
        self.library.fake_forget(kind.encode())

    def entries(self, device: str) -> int:
        """Work completions in its completion queues."""
        return self.library.fake_count_entries(device.encode())

    def live(self) -> dict[str, int]:
        """Handles that were not released, by kind; kinds without any are left out."""
        counts = {kind: self.library.fake_count_live(kind.encode()) for kind in KINDS}
        return {kind: count for kind, count in counts.items() if count}

    def log(self, verb: str = "") -> list[dict]:
        """The calls with arguments, in order."""
        calls = []
        for line in self._read("fake_read_log"):
            name, *words = line.split()
            pairs = dict(word.split("=", 1) for word in words)
            values = {key: int(v) if v.lstrip("-").isdigit() else v for key, v in pairs.items()}
            calls.append({"verb": name, **values})
        return [call for call in calls if call["verb"].startswith(verb)]

    def errors(self) -> list[str]:
        """The errors so far; when asked again, those since."""
        return self._read("fake_read_errors")

    def _read(self, function: str) -> list[str]:
        read = getattr(self.library, function)
        size = 1 << 16
        while True:
            text = ctypes.create_string_buffer(size)
            needed = read(text, ctypes.c_size_t(size))
            if needed < size:
                return text.value.decode().splitlines()
            size = needed + 1

    def check(self) -> None:
        """Nothing was leaked, nothing destroyed in a wrong order."""
        if self.live():
            gc.collect()
        errors, live = self.errors(), self.live()
        for kind in live:
            self.forget(kind)  # one failure, not all that follow
        assert not errors and not live, f"errors {errors}, alive {live}"
