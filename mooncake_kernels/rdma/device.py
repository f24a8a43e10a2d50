"""An open NIC."""

import ctypes
import time
import weakref
from dataclasses import dataclass
from typing import Any

from .. import _host
from .._arguments import as_instance, as_int32, as_integer, as_seconds
from .._machine_root import MachineRoot
from ..buffers import Buffer
from ..errors import InvalidArgument
from ._handles import SIGNAL_CHECK_S, Handle, require_verbs
from .completion_queue import CompletionQueue
from .info import DeviceInfo, PortInfo, describe, describe_port
from .region import Access, Mapping, Region, access_flags, register


@dataclass(frozen=True)
class Event:
    """An asynchronous event of a NIC.

    Attributes:
        type: verbs' name: ``"PORT_ERR"``, ``"PORT_ACTIVE"``, ``"QP_FATAL"``, ``"DEVICE_FATAL"``...
        port: for a port event; 0 otherwise.
        qp_num: for a queue pair event; 0 otherwise.
    """

    type: str
    port: int
    qp_num: int


class Device(Handle):
    """An open NIC and its protection domain. Made by ``rdma.open()``; thread-safe.

    Attributes:
        name: ``"mlx5_0"``.
        info: its description when it was opened.
    """

    def __init__(self, handle: Any, owner: Any = None):
        super().__init__(handle)
        self._owner = owner  # of a borrowed protection domain
        self.name: str = handle.name
        self.info: DeviceInfo = describe(handle.info)
        # By identity: its regions and queues, which hold memory.
        self._made: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()

    def close(self) -> None:
        """Release it, after all that depends on it. Idempotent; no effect in a forked child."""
        super().close()
        for reference in self._made.valuerefs():  # a copy: other threads may make more
            made = reference()
            if made is not None:
                made.close()  # closed by now, but it must hold no memory any longer

    def port(self, number: int = 1) -> PortInfo:
        """Return the current state of a port."""
        number = as_int32("port", "number", number)
        return describe_port(self.name, self._handle.port(number), MachineRoot())

    def register(
        self,
        buffer: Any,
        access: Access = "local",
        *,
        mapping: Mapping = "auto",
        relaxed_ordering: bool = True,
        max_piece_bytes: int = 0,
    ) -> Region:
        """Let this NIC use memory until the region is closed.

        See ``rdma.register()`` for arguments and errors, and for several NICs at once.
        """
        return register(
            [self],
            buffer,
            access,
            mapping=mapping,
            relaxed_ordering=relaxed_ordering,
            max_piece_bytes=max_piece_bytes,
        )[0]

    def register_dmabuf(
        self,
        fd: int,
        num_bytes: int,
        access: Access = "remote_read_write",
        *,
        offset: int = 0,
        address: int = 0,
        relaxed_ordering: bool = True,
    ) -> Region:
        """Let this NIC use memory exported as a dma-buf.

        Args:
            fd: the dma-buf; it may be closed afterwards.
            num_bytes: how much of it.
            access: as for ``rdma.register()``.
            offset: where in it the memory begins.
            address: the address of its first byte in transfers, equal to ``offset`` modulo a page.
            relaxed_ordering: as for ``rdma.register()``.

        Raises:
            InvalidArgument: no bytes, or a negative number.
            Unavailable: libibverbs lacks ``ibv_reg_dmabuf_mr`` (rdma-core before 34).
            OSError: the kernel refuses; EOPNOTSUPP if the NIC's driver does not support dma-bufs.
        """
        op, most = "register_dmabuf", (1 << 63) - 1
        fd = as_integer(op, "fd", fd, 0, (1 << 31) - 1)
        num_bytes = as_integer(op, "num_bytes", num_bytes, 1, most)
        offset = as_integer(op, "offset", offset, 0, most)
        address = as_integer(op, "address", address, 0, most)
        memory = Buffer(address, num_bytes, "dmabuf", True, None)
        flags = access_flags(memory, access, relaxed_ordering)
        made = _host.rdma_register_dmabuf(self._handle, fd, offset, address, num_bytes, flags)
        return Region(made, self, memory, flags)

    def completion_queue(self, depth: int = 1024) -> CompletionQueue:
        """Make a queue that reports finished operations.

        Args:
            depth: how many work requests its queue pairs may have in flight in all.
        """
        depth = as_int32("completion_queue", "depth", depth)
        queue = CompletionQueue(self._handle.completion_queue(depth), self)
        self._made[id(queue)] = queue
        return queue

    def wait_event(self, timeout_s: float = 0.0) -> Event | None:
        """Return the NIC's next asynchronous event; None when the time is up.

        Raises:
            InvalidArgument: the device is closed, or borrowed.
            OSError: EIO once the device is gone.
        """
        until = time.monotonic() + as_seconds("wait_event", "timeout_s", timeout_s, minimum=0)
        while True:
            left_s = until - time.monotonic()
            event = self._handle.wait_event(min(max(left_s, 0.0), SIGNAL_CHECK_S))
            if event or left_s <= SIGNAL_CHECK_S:
                return event and Event(*event)


def open(name: str) -> Device:
    """Open a NIC by its name.

    Raises:
        InvalidArgument: no NIC has that name; the message lists those that exist.
        Unavailable: no NIC at all, or no libibverbs, with the loader's message.
        OSError: it cannot be opened, for instance EACCES; the doctor says why.
    """
    require_verbs()
    return Device(_host.rdma_open(as_instance("open", "name", name, str, "a NIC's name")))


def on_protection_domain(pd: Any) -> Device:
    """Use a protection domain that pyverbs owns: memory registered on it serves its queue pairs.

    Close the device before the domain. Events are left to the domain's owner.

    Args:
        pd: ``pyverbs.pd.PD``, open.

    Raises:
        InvalidArgument: it is not one, or it is closed.
    """
    require_verbs()
    if type(pd).__module__ != "pyverbs.pd" or type(pd).__name__ != "PD":
        raise InvalidArgument(f"on_protection_domain: pd must be a pyverbs PD, got {pd!r}")
    address = _verbs_handle(pd)
    if not address:
        raise InvalidArgument("on_protection_domain: pd must be open, but is closed")
    # struct ibv_pd: its context, and the number that pyverbs reports as well.
    context = ctypes.c_uint64.from_address(address).value
    number = ctypes.c_uint32.from_address(address + 8).value
    if number != pd.handle:
        raise InvalidArgument(
            f"on_protection_domain: pd must be laid out as in pyverbs 44, got a PD {pd.handle} "
            f"that says {number}"
        )
    return Device(_host.rdma_borrow(context, address), owner=pd)


def _verbs_handle(wrapper: Any) -> int:
    """The C pointer that an object of pyverbs wraps: the first field of its own class.

    Python cannot get it from pyverbs: ``PD.pd`` returns the pointer as if it were a Python object.
    """
    base: type = type(wrapper).__mro__[1]
    offset = base.__basicsize__
    return ctypes.c_uint64.from_address(id(wrapper) + offset).value
