"""The data plane of KVCache-centric LLM serving. Importing it touches no device and no NIC."""

from . import errors, hashing, kv, metadata, metrics, rdma, topology, transfer
from .buffers import shared_memory
from .errors import ChecksumError, CudaError, InvalidArgument, TransferError, Unavailable
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
from .metrics import prometheus_collector
from .topology import NicPolicy, Topology
from .transfer import BlockPool, PathChoice, Tls, TransferEngine

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "ChecksumError",
    "CopyPlan",
    "CudaError",
    "Fp8",
    "InvalidArgument",
    "KVView",
    "LayerStream",
    "NicPolicy",
    "PackHeader",
    "Packer",
    "PathChoice",
    "Rope",
    "Tls",
    "Topology",
    "TransferEngine",
    "TransferError",
    "Unavailable",
    "block_hashes",
    "checksum_blocks",
    "copy_batch",
    "errors",
    "gather_blocks",
    "hashing",
    "kv",
    "metadata",
    "metrics",
    "prometheus_collector",
    "rdma",
    "scatter_blocks",
    "shard_heads",
    "shared_memory",
    "topology",
    "transfer",
]
