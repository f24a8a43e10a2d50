"""The contenders of bench_attention: ours, torch's three ways, FlashInfer, FlashAttention-3 and 4.

Each side has two steps, which can be timed together or separately: make its mask (or plan), and
attend under it. Whatever a library prefers is prepared beforehand: gathered keys and values, and
repeated heads where it cannot share them. Ours reads the paged cache as it is.

The FlashInfer and FlashAttention baselines were written from their sources (FlashInfer 0.7,
flash-attn-4 4.0.0b36) and have never run. FlashAttention-3 runs plain causal only: its window has
no sinks, and no case here is a window without them.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import mooncake_kernels as mk

Sees = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
compiled_flex = torch.compile(flex_attention, dynamic=False)
# Not on the CPU: for some of these masks inductor (2.13) generates C++ that does not compile.
make_block_mask = {
    "cpu": create_block_mask,
    "cuda": torch.compile(create_block_mask, dynamic=False),
}
WORKSPACE_BYTES = 256 << 20  # FlashInfer's


class NotHere(Exception):
    """A library is not installed."""


@dataclass
class Job:
    """Queries, and the paged cache that they attend to.

    Attributes:
        rule: which keys they see.
        sees: the same rule as flex_attention's users write it, from positions.
        is_causal: whether the rule is plain causal, and the queries are the last of their request.
        batch: the lengths, and the queries' positions.
        q: ``[num_q, heads, dim]``.
        cache: keys and values, ``[blocks, block_size, kv_heads, dim]`` each.
        table: the ids of the blocks, ``[requests, blocks]``.
    """

    rule: mk.mask.Rule
    sees: Sees
    is_causal: bool
    batch: mk.ChunkBatch
    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    table: torch.Tensor

    @property
    def is_whole_prompt(self) -> bool:
        return self.is_causal and self.batch.num_requests == 1 and self.q_lens == self.kv_lens

    @property
    def q_lens(self) -> list[int]:
        return self.batch.q_lens_list

    @property
    def kv_lens(self) -> list[int]:
        return self.batch.kv_lens_list

    @property
    def block_size(self) -> int:
        return self.cache[0].shape[1]

    @property
    def num_shared(self) -> int:
        """How many query heads share the same keys."""
        return self.q.shape[1] // self.cache[0].shape[2]

    def gathered(self, part: int) -> list[torch.Tensor]:
        """Return the keys (0) or values (1) of each request, ``[kv_len, kv_heads, dim]``."""
        return [
            self.cache[part][self.table[i].long()].flatten(0, 1)[:kv_len]
            for i, kv_len in enumerate(self.kv_lens)
        ]

    def repeated(self, part: int) -> list[torch.Tensor]:
        """Return them for each head, heads first."""
        return [
            one.transpose(0, 1).repeat_interleave(self.num_shared, 0) for one in self.gathered(part)
        ]


class Ours:
    """Rows, and paged_attention."""

    def __init__(self, job: Job):
        self.job = job

    def make(self) -> Any:
        return mk.mask.rows(self.job.rule, self.job.batch)

    def attend(self, rows: Any) -> torch.Tensor:
        return mk.paged_attention(self.job.q, *self.job.cache, self.job.table, rows)[0]


class SdpaMask:
    """One request after the other, by a bool mask made from our rows: SDPA has no mask builder."""

    def __init__(self, job: Job):
        self.masks = mk.mask.rows(job.rule, job.batch).dense()
        self.q = [part.transpose(0, 1).contiguous()[None] for part in job.q.split(job.q_lens)]
        self.k, self.v = ([one[None] for one in job.repeated(part)] for part in range(2))

    def make(self) -> Any:
        return self.masks

    def attend(self, masks: Any) -> torch.Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        outs = [
            sdpa(q, k, v, attn_mask=mask)[0]
            for q, k, v, mask in zip(self.q, self.k, self.v, masks, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1)


class SdpaCausal(SdpaMask):
    """One whole prompt only: its causal mask begins at the first key."""

    def attend(self, _: Any) -> torch.Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(self.q[0], self.k[0], self.v[0], is_causal=True)[0].transpose(0, 1)


class Flex:
    """All requests at once, compiled; the mask has one document per request."""

    def __init__(self, job: Job):
        self.job = job
        device = job.q.device
        self.position = job.batch.query_positions().long()
        self.request = job.batch.request_of()
        self.key_position = torch.cat([torch.arange(n, device=device) for n in job.kv_lens])
        self.key_request = torch.repeat_interleave(job.batch.kv_lens)
        self.q = job.q.transpose(0, 1)[None].contiguous()
        self.k, self.v = (torch.cat(job.repeated(part), 1)[None] for part in range(2))

    def make(self) -> Any:
        sees = self.job.sees

        def of_one(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return sees(self.position[i], j)

        def of_several(b: Any, h: Any, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            is_own = self.request[i] == self.key_request[j]
            return is_own & sees(self.position[i], self.key_position[j])

        mask_mod = of_one if self.job.batch.num_requests == 1 else of_several
        num_q, num_keys = len(self.request), len(self.key_request)
        device = self.job.q.device.type
        return make_block_mask[device](mask_mod, None, None, num_q, num_keys, device=device)

    def attend(self, block_mask: Any) -> torch.Tensor:
        return compiled_flex(self.q, self.k, self.v, block_mask=block_mask)[0].transpose(0, 1)


class Packed:
    """Shared code of kernels that take the requests concatenated."""

    def __init__(self, job: Job):
        self.q = job.q
        self.k, self.v = (torch.cat(job.gathered(part)).contiguous() for part in range(2))
        self.cu = (job.batch.cu_q, cumulated(job.kv_lens, job.q.device))
        self.most = (max(job.q_lens), max(job.kv_lens))

    def make(self) -> Any:
        return None


class Varlen(Packed):
    """torch.nn.attention.varlen, whose arguments differ between torch versions."""

    def __init__(self, job: Job):
        super().__init__(job)
        varlen = imported("torch.nn.attention.varlen")
        known = inspect.signature(varlen.varlen_attn).parameters
        has_window, shares = "window_size" in known, "enable_gqa" in known
        self.options: dict[str, Any] = (
            {"window_size": (-1, 0)} if has_window else {"is_causal": True}
        )
        if shares:
            self.options["enable_gqa"] = True
        else:
            self.k, self.v = (t.repeat_interleave(job.num_shared, 1) for t in (self.k, self.v))
        self.call = varlen.varlen_attn

    def attend(self, _: Any) -> torch.Tensor:
        return self.call(self.q, self.k, self.v, *self.cu, *self.most, **self.options)


class FlashAttention3(Packed):
    """FlashAttention-3, through its interface of the same form."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.call = imported("flash_attn_interface").flash_attn_varlen_func

    def attend(self, _: Any) -> torch.Tensor:
        out = self.call(self.q, self.k, self.v, *self.cu, *self.most, causal=True)
        return out[0] if isinstance(out, tuple) else out


class FlashAttention4(Packed):
    """Its CuTe kernels, plain causal."""

    def __init__(self, job: Job):
        super().__init__(job)
        self.call = imported("flash_attn.cute.interface").flash_attn_varlen_func

    def attend(self, _: Any) -> torch.Tensor:
        lens = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.cu, strict=True))
        most = dict(zip(("max_seqlen_q", "max_seqlen_k"), self.most, strict=True))
        out = self.call(self.q, self.k, self.v, **lens, **most, causal=True)
        return out[0] if isinstance(out, tuple) else out


class FlashAttention4Blocks(Packed):
    """The same for one request, by block sparsity. It cannot build the lists, so we do.

    In partial blocks it calls a mask_mod, which looks up the row's intervals.
    """

    # A multiple of q_stage * tile_m (256 and 128 on sm_100, 128 on sm_90), and tile_n.
    BLOCK_Q, BLOCK_KV = 256, 128

    def __init__(self, job: Job):
        super().__init__(job)
        self.job = job
        self.call = imported("flash_attn.cute.interface").flash_attn_func
        self.tensors = imported("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
        self.mask_mod = intervals_in_cute()
        if bool(mk.mask.rows(job.rule, job.batch).tail_bits.any()):
            raise NotHere("the mask has tail bits, for which there is no mask_mod here")

    def make(self) -> Any:
        rows = mk.mask.rows(self.job.rule, self.job.batch)
        blocks = rows.block_map(self.BLOCK_Q, self.BLOCK_KV).to_flash_attn4(varlen=False)
        if blocks.full_block_idx.shape[-1] == 0:
            blocks = blocks._replace(full_block_cnt=None, full_block_idx=None)
        return self.tensors(**blocks._asdict()), rows.intervals

    def attend(self, mask: Any) -> torch.Tensor:
        blocks, intervals = mask
        out = self.call(
            self.q[None], self.k[None], self.v[None], pack_gqa=False, mask_mod=self.mask_mod,
            aux_tensors=[intervals], block_sparse_tensors=blocks,
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out)[0]


def intervals_in_cute() -> Callable[..., Any]:
    """Return a mask_mod of FlashAttention-4: whether a key is in one of its row's intervals."""
    cutlass, cute = imported("cutlass"), imported("cutlass.cute")
    as_vector = imported("flash_attn.cute.utils").scalar_to_ssa

    @cute.jit
    def mask_mod(batch, head, row, key, seqlen_info, aux_tensors):
        intervals = aux_tensors[0]
        lo0 = as_vector(intervals[row[0], 0], cutlass.Int32)
        hi0 = as_vector(intervals[row[0], 1], cutlass.Int32)
        lo1 = as_vector(intervals[row[0], 2], cutlass.Int32)
        hi1 = as_vector(intervals[row[0], 3], cutlass.Int32)
        return ((key >= lo0) & (key < hi0)) | ((key >= lo1) & (key < hi1))

    return mask_mod


class FlashInfer:
    """Its paged prefill, with a custom mask where the rule is not plain causal."""

    def __init__(self, job: Job):
        flashinfer = imported("flashinfer")
        self.job = job
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=job.q.device)
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        counts = [-(-kv_len // job.block_size) for kv_len in job.kv_lens]
        self.indptr = cumulated(counts, job.q.device)
        self.indices = torch.cat([row[:n] for row, n in zip(job.table, counts, strict=True)])
        last = [(kv_len - 1) % job.block_size + 1 for kv_len in job.kv_lens]
        self.last = torch.tensor(last, dtype=torch.int32, device=job.q.device)

    def make(self) -> Any:
        """Plan, which is where it takes the mask: dense, as its users have it."""
        mask: dict[str, Any] = {"causal": True}
        if not self.job.is_causal:
            dense = mk.mask.rows(self.job.rule, self.job.batch).dense()
            mask = {"custom_mask": torch.cat([one.flatten() for one in dense])}
        q, (k, _) = self.job.q, self.job.cache
        self.wrapper.plan(
            self.job.batch.cu_q, self.indptr, self.indices, self.last,
            q.shape[1], k.shape[2], q.shape[2], self.job.block_size, q_data_type=q.dtype, **mask,
        )  # fmt: skip

    def attend(self, _: Any) -> torch.Tensor:
        return self.wrapper.run(self.job.q, self.job.cache)


def baselines_of(job: Job) -> dict[str, type]:
    """Return the baselines that have a kernel for this device and can express this mask."""
    baselines: dict[str, type] = {"sdpa_mask": SdpaMask, "flex": Flex}
    if job.is_whole_prompt:
        baselines["sdpa_causal"] = SdpaCausal
    if job.q.device.type == "cuda":
        baselines["flashinfer"] = FlashInfer
        if job.is_causal:
            baselines |= {"varlen": Varlen, "flash3": FlashAttention3, "flash4": FlashAttention4}
        elif job.batch.num_requests == 1:
            baselines["flash4"] = FlashAttention4Blocks
    return baselines


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotHere(str(error)) from error


def cumulated(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0, dtype=torch.int32)
