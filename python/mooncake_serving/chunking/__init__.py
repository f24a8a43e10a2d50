"""Chunked prefill: the size of a chunk, and the content of a step (SARATHI, Sarathi-Serve).

from mooncake_serving.chunking import choose_chunk_size, pack_batch, profile_chunks

profile = profile_chunks(run, sizes=range(128, 2049, 128))   # run(num_tokens): one step, to its end
chunk = choose_chunk_size(profile, num_decodes=17, prefill_per_decode=14.0)
batch = pack_batch(decodes, prefills, budget=chunk + 17)     # a ChunkBatch, and whose rows
"""

from .chunk_size import choose_chunk_size
from .pack import PackedBatch, PendingRequest, pack_batch
from .profile import ChunkProfile, profile_chunks

__all__ = [
    "ChunkProfile",
    "PackedBatch",
    "PendingRequest",
    "choose_chunk_size",
    "pack_batch",
    "profile_chunks",
]
