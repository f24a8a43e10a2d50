"""A Llama-family model over a paged KV cache, and an engine that serves it.

from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model

model, tokenizer = load_model()                           # SmolLM2-135M-Instruct
engine = Engine(model, PagedKVCache(model.config, num_blocks=256))
prompt = tokenizer.encode("The capital of France is")
[answer] = engine.generate([prompt], SamplingParams(max_tokens=8))
tokenizer.decode(answer.token_ids)                        # " Paris..."

It needs the packages of the extra ``serving``.
"""

from mooncake_kernels.extras import needed_from

with needed_from("serving", __name__):
    from .batch import Batch, Chunk
    from .block_allocator import BlockAllocator
    from .config import ModelConfig, RopeScaling
    from .engine import Engine
    from .errors import InvalidModel, ModelNotFound, NotFinite, OutOfBlocks, UnsupportedModel
    from .kv_cache import PagedKVCache
    from .llama import LayerHooks, Llama
    from .loader import find_model, load_model
    from .request import FinishReason, Generation, PrefillChunk, Prefilled, TokenOutput
    from .reuse import Filled, Reuse, SemanticPrefill
    from .sampling import SamplingParams
    from .semantic_cache import SemanticCache
    from .tokenizer import TextStream, Tokenizer

__all__ = [
    "Batch",
    "BlockAllocator",
    "Chunk",
    "Engine",
    "Filled",
    "FinishReason",
    "Generation",
    "InvalidModel",
    "LayerHooks",
    "Llama",
    "ModelConfig",
    "ModelNotFound",
    "NotFinite",
    "OutOfBlocks",
    "PagedKVCache",
    "PrefillChunk",
    "Prefilled",
    "Reuse",
    "RopeScaling",
    "SamplingParams",
    "SemanticCache",
    "SemanticPrefill",
    "TextStream",
    "TokenOutput",
    "Tokenizer",
    "UnsupportedModel",
    "find_model",
    "load_model",
]
