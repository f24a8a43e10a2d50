"""The data plane of KVCache-centric LLM serving. Importing it touches no device and no NIC."""

from . import (
    attention,
    errors,
    hashing,
    kv,
    mask,
    metadata,
    metrics,
    pool,
    rdma,
    similarity,
    topology,
    transfer,
)
from .attention import append_kv, merge_attention, paged_attention
from .buffers import shared_memory
from .errors import (
    ChecksumError,
    CudaError,
    FailureKind,
    InvalidArgument,
    PoolDamaged,
    TransferError,
    Unavailable,
)
from .hashing import block_hashes
from .kv import (
    CopyPlan,
    Fp8,
    KVView,
    LayerStream,
    Packer,
    PackHeader,
    Rope,
    checksum_blocks,
    copy_batch,
    gather_blocks,
    scatter_blocks,
    shard_heads,
)
from .mask import ChunkBatch, MaskRows
from .metrics import prometheus_collector
from .pool import ObjectPool, ObjectPut, PutResult, object_key, object_keys
from .similarity import hamming_match, simhash
from .topology import NicPolicy, Topology
from .transfer import BlockPool, PathChoice, Tls, TransferEngine

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "ChecksumError",
    "ChunkBatch",
    "CopyPlan",
    "CudaError",
    "FailureKind",
    "Fp8",
    "InvalidArgument",
    "KVView",
    "LayerStream",
    "MaskRows",
    "NicPolicy",
    "ObjectPool",
    "ObjectPut",
    "PackHeader",
    "Packer",
    "PathChoice",
    "PoolDamaged",
    "PutResult",
    "Rope",
    "Tls",
    "Topology",
    "TransferEngine",
    "TransferError",
    "Unavailable",
    "append_kv",
    "attention",
    "block_hashes",
    "checksum_blocks",
    "copy_batch",
    "errors",
    "gather_blocks",
    "hamming_match",
    "hashing",
    "kv",
    "mask",
    "metadata",
    "merge_attention",
    "metrics",
    "object_key",
    "object_keys",
    "paged_attention",
    "pool",
    "prometheus_collector",
    "rdma",
    "scatter_blocks",
    "shard_heads",
    "shared_memory",
    "simhash",
    "similarity",
    "topology",
    "transfer",
]
