"""``HiCacheStore``: the store as the storage (L3) behind SGLang's HiCache.

::

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
        --hicache-mem-layout page_first --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{
            "backend_name": "mooncake-kernels",
            "module_path": "mooncake_serving.connectors.sglang.hicache",
            "class_name": "HiCacheStore",
            "interface_v1": 1,
            "url": "shm:/dev/shm/kv?size=64GiB"}'

SGLang copies between GPUs and its host pools, for all ranks; this copies pages between those pools
and a store, which other engines share. docs/serving/engines.md.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from mooncake_kernels.errors import InvalidArgument, shown

from ..tier_store import TierStore, namespace_of

log = logging.getLogger("mooncake_serving.connectors.sglang")

OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}
OURS = {"url", "namespace"}
# What pools without addresses of whole pages raise when these are requested.
NO_ADDRESSES = (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError)


class HiCacheStore(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there
    """Pages of SGLang's host pools in the store that a URL names. Thread-safe.

    A page is one object, whatever its parts in a host pool, under SGLang's own hash, in a namespace
    of the model, the rank's share of it and the pool's form: pools of other page sizes, dtypes or
    layouts have other pages. With ``"interface_v1": 1`` pages are copied between a host pool and
    the store without a copy between, if the pool has addresses for them (``page_first`` layouts;
    MHA and MLA with any). What the store cannot do is a miss, or a page that is not stored, and is
    logged once of each kind.

    Args:
        storage_config: of this rank; its ``extra_config`` has ``url``, see ``open_store``, and
            optionally ``namespace``: engines with different ones do not share pages.
        kwargs: of SGLang's factory.

    Raises:
        InvalidArgument: an option is unknown, missing or wrong.
        OSError, Unavailable: as ``open_store``.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ):
        options = dict(storage_config.extra_config or {})
        if unknown := options.keys() - OF_SGLANG - OURS:
            known = ", ".join(sorted(OF_SGLANG | OURS))
            raise _wrong("extra_config", f"no others than {known}", ", ".join(sorted(unknown)))
        namespace = options.get("namespace", "")
        if not isinstance(namespace, str):
            raise _wrong("namespace", "a str", shown(namespace))
        if storage_config.should_split_heads:
            raise _wrong("tp_lcm_size", "absent: heads are not split", "one larger than tp_size")
        self._config = storage_config
        self._uses_addresses = bool(options.get("interface_v1", 0))
        self._store = TierStore(options.get("url", ""), _namespace(storage_config, namespace))
        self._kv = self._flat_kv = _Pages("kv", None, "kv", is_flat=True)
        self._pools: dict[str, _Pages] = {}

    # --- host pools ---------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Set the pool of keys and values.

        Raises:
            InvalidArgument: a page is larger than the store.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._flat_kv = self._pages(PoolName.KV, mem_pool_host, is_flat=True)
        self._kv = self._flat_kv
        if self._uses_addresses:
            self._kv = self._pages(PoolName.KV, mem_pool_host, is_flat=False)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Set another pool, as of states or an indexer; raises as ``register_mem_pool_host``."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            pages = self._pages(host_pool_name, host_pool, is_flat=False)
            self._pools[str(host_pool_name)] = pages

    def _pages(self, name: PoolName, pool: Any, *, is_flat: bool) -> "_Pages":
        pages = _Pages(str(name), pool, self._owner(name, pool), is_flat=is_flat)
        self._store.check_page("HiCacheStore", pages.num_bytes)
        return pages

    def _owner(self, name: PoolName, pool: Any) -> str:
        """Name the ranks whose pages are the same: all of a replicated pool, else one."""
        config = self._config
        is_draft = name in (PoolName.DRAFT, PoolName.DRAFT_SWA)
        kind = type(pool).__name__
        is_replicated = (
            config.is_mla_model
            and name != PoolName.MAMBA
            and not (is_draft and "MLA" not in kind and "DeepSeekV4" not in kind)
        )
        rank = "all" if is_replicated else f"{config.tp_rank} of {config.tp_size}"
        context = f"{config.attn_cp_rank} of {config.attn_cp_size}"
        decode = f"{config.dcp_rank} of {config.dcp_size}"
        return f"tp {rank}, pp {config.pp_rank} of {config.pp_size}, cp {context}, dcp {decode}"

    # --- pages by their indices in host pools -------------------------------------------------

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Load pages into the pool of keys and values; which are there."""
        return self._get(self._kv, keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the pool of keys and values; which are in the store now."""
        return self._set(self._kv, keys, host_indices)

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Do the same as ``batch_get_v1`` with any pools, by name."""
        return {
            one.name: self._get(self._of(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Do the same as ``batch_set_v1`` with any pools, by name."""
        return {
            one.name: self._set(self._of(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Count the leading pages of keys and values that are there."""
        return len(keys) if self._kv.is_logical else self._store.match_prefix(self._kv.names(keys))

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Tell how many leading pages all pools can serve, and all shorter prefixes that they can.

        Of ALL_PAGES, a pool needs every page of a prefix; of TRAILING_PAGES, as many of its last
        ones as the transfer has keys. A pool of BLOCK_GROUPS limits no prefix: how many pages are
        covered by the leading groups of its keys that are complete, is reported beside.
        """
        asked = [one for one in pool_transfers or () if self._is_gate(one)]
        pools = [self._kv, *(self._of(one.name) for one in asked)]
        there = self._exist(keys, pools)
        num_pages = _leading(there[0])
        hits: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
        lengths = np.arange(1, num_pages + 1)
        restorable = np.ones(num_pages, bool)
        for transfer, found in zip(asked, there[1:], strict=True):
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                serves = lengths <= _leading(found)
            else:
                window = max(1, len(transfer.keys or ()))
                sums = np.concatenate([[0], np.cumsum(found[:num_pages])])
                first = np.maximum(lengths - window, 0)
                serves = sums[lengths] - sums[first] == lengths - first
            if serves.any():
                hits[transfer.name] = int(lengths[serves][-1])
            restorable &= serves
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS and (
                covered := self._leading_groups(transfer) * transfer.block_pages
            ):
                hits[transfer.name] = covered
        prefixes = lengths[restorable].tolist()
        return PoolTransferResult(prefixes[-1] if prefixes else 0, hits, prefixes)

    # --- pages as tensors ---------------------------------------------------------------------

    def get(
        self,
        key: str,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> torch.Tensor | None:
        """Copy a page into a packed tensor of its size, and return that; None if there is none.

        Without a tensor, the page is returned as a tensor of bytes.
        """
        if target_location is not None:
            return self.batch_get([key], [target_location])[0]
        page = self._store.get(self._flat_kv.names([key])[0])
        return None if page is None else torch.frombuffer(bytearray(page), dtype=torch.uint8)

    def batch_get(
        self,
        keys: list[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Do the same with many pages, in one call."""
        if target_locations is None:
            return [self.get(key) for key in keys]
        tensors = list(target_locations)
        found = self._store.get_each(self._flat_kv.names(keys), *_places(tensors))
        return [tensor if ok else None for tensor, ok in zip(tensors, found.tolist(), strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store a tensor; whether it is in the store now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Store tensors; whether all are in the store now."""
        tensors = [value.detach().cpu().contiguous() for value in values or ()]
        if len(tensors) != len(keys):
            return False
        return bool(self._store.put_each(self._flat_kv.names(keys), *_places(tensors)).all())

    def exists(self, key: str) -> bool:
        """Tell whether a page of keys and values is there."""
        return self.batch_exists([key]) == 1

    def clear(self) -> bool:
        """Remove the pages of this model and namespace, of all ranks and pools, see
        ``TierStore.clear``.
        """
        return self._store.clear()

    def close(self) -> None:
        """Close the store, whose objects stay. Idempotent."""
        self._store.close()

    # --- the same for any pool ----------------------------------------------------------------

    def _of(self, name: str) -> "_Pages":
        return self._kv if name == PoolName.KV else self._pools.get(str(name), _UNKNOWN)

    def _is_gate(self, transfer: PoolTransfer) -> bool:
        return transfer.hit_policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)

    def _leading_groups(self, transfer: PoolTransfer) -> int:
        """Count the leading groups of ``group_pages`` keys whose pages are all there."""
        keys, size = transfer.keys or [], transfer.group_pages
        return _leading(self._exist(keys, [self._of(transfer.name)])[0]) // size if size > 0 else 0

    def _exist(self, keys: Sequence[str], pools: Sequence["_Pages"]) -> np.ndarray:
        """``[pools, n]`` bool, by one look-up."""
        names = [name for pages in pools if pages.is_stored for name in pages.names(keys)]
        found = iter(self._store.exists_each(names).reshape(-1, max(len(keys), 1)))
        rows = [
            next(found)[: len(keys)]
            if pages.is_stored and keys
            else np.full(len(keys), pages.is_logical)
            for pages in pools
        ]
        return np.array(rows, bool).reshape(len(pools), len(keys))

    def _get(self, pages: "_Pages", keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        if indices is None or not pages.fits(keys, indices):
            return [pages.is_logical] * len(keys)
        names = pages.names(keys)
        if not pages.is_flat:
            return self._store.get_each(names, *pages.places(indices)).tolist()
        tensors = [pages.pool.get_dummy_flat_data_page() for _ in keys]
        found = self._store.get_each(names, *_places(tensors)).tolist()
        for first, tensor, ok in zip(pages.firsts(indices), tensors, found, strict=True):
            if ok:
                pages.pool.set_from_flat_data_page(first, tensor)
        return found

    def _set(self, pages: "_Pages", keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        if indices is None or not pages.fits(keys, indices):
            return [pages.is_logical] * len(keys)
        names = pages.names(keys)
        if not pages.is_flat:
            return self._store.put_each(names, *pages.places(indices)).tolist()
        firsts = pages.firsts(indices)
        tensors = [pages.pool.get_data_page(first, flat=True).contiguous() for first in firsts]
        return self._store.put_each(names, *_places(tensors)).tolist()


class _Pages:
    """Pages of one host pool.

    Attributes:
        pool: SGLang's; None: there is none.
        is_flat: whether pages are copied into one tensor first, which has their bytes in another
            order than the parts of a page.
        is_logical: the pool has indices and no memory: all its pages are there.
        num_bytes: of a page.
    """

    def __init__(self, name: str, pool: Any, owner: str, *, is_flat: bool):
        self.pool = pool
        sizes = (getattr(pool, name, 0) for name in ("logical_page_size", "page_size"))
        self.page_size: int = next(filter(None, sizes), 1)
        self.is_logical = pool is not None and _is_logical(pool)
        self.is_flat = is_flat
        self._sizes: list[int] = []
        if self.is_stored and not is_flat:
            try:
                _, self._sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
            except NO_ADDRESSES as error:
                log.info("pool %s: pages are copied once more than needed: %s", name, error)
                self.is_flat = True
        if self.is_stored and self.is_flat:
            page = pool.get_dummy_flat_data_page()
            self._sizes = [page.numel() * page.element_size()]
        self.num_bytes = sum(self._sizes)
        form = {
            "pool": name,
            "owner": owner,
            "class": type(pool).__name__,
            "layout": getattr(pool, "layout", None),
            "dtype": getattr(pool, "dtype", None),
            "page_size": self.page_size,
            "layers": [getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)],
            "sizes": self._sizes,
            "is_flat": self.is_flat,
        }
        self._prefix = namespace_of("page", form)

    @property
    def is_stored(self) -> bool:
        """Whether the pool has memory."""
        return self.pool is not None and not self.is_logical

    def names(self, keys: Sequence[str]) -> list[str]:
        return [f"{self._prefix} {key}" for key in keys]

    def fits(self, keys: Sequence[str], indices: torch.Tensor) -> bool:
        """Whether there are pages, and as many indices as they have tokens."""
        if not self.is_stored:
            return False
        expected = len(keys) * self.page_size
        if indices.numel() != expected:
            log.error("%d pages must have %d indices, got %d", len(keys), expected, indices.numel())
            return False
        return bool(keys)

    def firsts(self, indices: torch.Tensor) -> list[int]:
        return indices[:: self.page_size].tolist()

    def places(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = self.pool.get_page_buffer_meta(indices.cpu())
        return addresses, sizes


_UNKNOWN = _Pages("unknown", None, "no one", is_flat=True)


def _is_logical(pool: Any) -> bool:
    return hasattr(pool, "kv_buffer") and pool.kv_buffer is None


def _leading(found: np.ndarray) -> int:
    missing = np.flatnonzero(~found)
    return int(missing[0]) if len(missing) else len(found)


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Addresses and sizes of packed tensors in host memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise _wrong("tensors", "packed, in host memory", f"one on {tensor.device}")
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.numel() * tensor.element_size() for tensor in tensors],
    )


def _namespace(config: HiCacheStorageConfig, namespace: str) -> str:
    parts = {"model": config.model_name, "namespace": namespace, "mla": config.is_mla_model}
    return namespace_of("sglang", parts)


def _wrong(argument: str, need: str, value: str) -> InvalidArgument:
    return InvalidArgument(f"HiCacheStore: {argument} must be {need}, got {value}")
