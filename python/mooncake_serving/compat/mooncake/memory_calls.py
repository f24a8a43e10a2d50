"""The calls of ``TransferEngine`` that register or access memory."""

from collections.abc import Iterable, Sequence

from mooncake_kernels.errors import InvalidArgument

from .codes import ERR_INVALID_ARGUMENT, as_natural, returns
from .lifecycle import Lifecycle


class MemoryCalls(Lifecycle):
    """Memory is identified by its address; the caller that registered it keeps it alive."""

    @returns(ERR_INVALID_ARGUMENT)
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Let peers read and write a range; read-only memory can only be read.

        Args:
            buffer_addr: where it begins, in memory of this process: of the host, or of one
                allocation on a GPU.
            capacity: bytes.
            location: ``"*"``; or where the memory is, ``"cpu:<node>"``, ``"cuda:<GPU>"``.

        Returns:
            0; -7 if it overlaps registered memory, -303 for another kind of location, else -1.
        """
        return self._register(("buffer_addr", "capacity"), [buffer_addr], [capacity], location)

    @returns(ERR_INVALID_ARGUMENT)
    def unregister_memory(self, buffer_addr: int) -> int:
        """Undo ``register_memory``; transfers that use the memory end with a failure.

        Returns:
            0, and from now on the engine does not touch it; -3 if no registered range begins there.
        """
        self._running().memory.unregister(
            [as_natural("buffer_addr", buffer_addr)], argument="buffer_addr"
        )
        return 0

    @returns(ERR_INVALID_ARGUMENT)
    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """Register several ranges, all or, on a failure, none; see ``register_memory``."""
        arguments = ("buffer_addresses", "capacities")
        return self._register(arguments, buffer_addresses, capacities, location)

    @returns(ERR_INVALID_ARGUMENT)
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregister several ranges, all or, if one is not registered, none."""
        self._running().memory.unregister(
            _naturals("buffer_addresses", buffer_addresses), argument="buffer_addresses"
        )
        return 0

    @returns(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of new registered memory of ``length`` bytes, 0 on failure."""
        return self._running().memory.allocate(as_natural("length", length, minimum=1))

    @returns(ERR_INVALID_ARGUMENT)
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Free what ``allocate_managed_buffer(length)`` returned; transfers that use it fail.

        Returns:
            0; -3 if there is no such buffer.
        """
        address, num_bytes = as_natural("buffer_addr", buffer_addr), as_natural("length", length)
        self._running().memory.free(address, num_bytes)
        return 0

    @returns(ERR_INVALID_ARGUMENT)
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int) -> int:
        """Copy the first ``length`` bytes of an object into registered memory of this engine.

        Returns:
            0; -1 if the target is not inside registered memory, or the object is shorter.
        """
        address, num_bytes = as_natural("dest_address", dest_address), as_natural("length", length)
        try:
            data = memoryview(src_ptr.encode() if isinstance(src_ptr, str) else src_ptr).cast("B")
        except TypeError:
            raise InvalidArgument(f"src_ptr must be bytes, got {src_ptr!r:.80}") from None
        if num_bytes > len(data):
            raise InvalidArgument(f"length must be at most {len(data)}, got {num_bytes}")
        self._running().memory.write(address, data[:num_bytes])
        return 0

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return a copy of registered memory of this engine.

        Raises:
            InvalidArgument: the range is not inside registered memory.
        """
        address = as_natural("source_address", source_address)
        num_bytes = as_natural("length", length)
        return self._running("read_bytes_from_buffer").memory.read(address, num_bytes)

    def _register(
        self,
        arguments: tuple[str, str],
        addresses: Iterable[int],
        capacities: Iterable[int],
        location: str,
    ) -> int:
        begins = _naturals(arguments[0], addresses)
        sizes = _naturals(arguments[1], capacities, minimum=1)
        if len(begins) != len(sizes):
            raise InvalidArgument(
                "buffer_addresses and capacities must be equally long, got "
                f"{len(begins)} and {len(sizes)}"
            )
        self._running().memory.register(
            zip(begins, sizes, strict=True), location, argument=arguments[0]
        )
        return 0


def _naturals(argument: str, values: Iterable[int], *, minimum: int = 0) -> list[int]:
    try:
        return [as_natural(argument, value, minimum=minimum) for value in values]
    except TypeError:
        raise InvalidArgument(
            f"{argument} must be a list of integers, got {values!r:.80}"
        ) from None
