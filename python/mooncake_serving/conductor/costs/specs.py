"""Specifications of models and machines for a roofline; some of each, with sources."""

from dataclasses import dataclass

from ..errors import check_count, check_positive


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense transformer with gated MLPs and grouped-query attention.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_heads: query heads of a layer.
        num_kv_heads: key and value heads of a layer.
        head_dim: of each head.
        intermediate_size: width of the MLP, which has three matrices.
        vocab_size: rows of the embedding, and of the output matrix, which is separate.
        bytes_per_param: of weights.
        bytes_per_kv: of an element of the KV cache.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    bytes_per_param: float = 2
    bytes_per_kv: float = 2

    def __post_init__(self) -> None:
        """Check that all are positive."""
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
        ):
            check_count("ModelSpec", name, getattr(self, name), 1)
        check_positive("ModelSpec", "bytes_per_param", self.bytes_per_param)
        check_positive("ModelSpec", "bytes_per_kv", self.bytes_per_kv)

    @property
    def num_layer_params(self) -> int:
        """Count the weights of the matrices that each token goes through, over all layers."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q and the output, k and v
        attention = self.hidden_size * heads * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, including both vocabulary matrices."""
        vocabulary = 2 * self.vocab_size * self.hidden_size
        return (self.num_layer_params + vocabulary) * self.bytes_per_param

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one token takes in the KV cache of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv

    @property
    def attention_flops_per_pair(self) -> float:
        """Operations for one query and one key: a product for the score, one for the value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """One node that runs one instance of a model, over all its GPUs.

    Attributes:
        flops: dense operations per second in the weights' dtype, all GPUs together.
        memory_bytes_per_s: of all GPUs' memories together.
        memory_bytes: of all GPUs together.
        nic_bytes_per_s: of all its NICs together, in one direction.
    """

    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    nic_bytes_per_s: float

    def __post_init__(self) -> None:
        """Check that all are positive."""
        for name in ("flops", "memory_bytes_per_s", "memory_bytes", "nic_bytes_per_s"):
            check_positive("MachineSpec", name, getattr(self, name))


# Meta's config.json of Llama-3-70B. It makes 320 KiB of KV per token, as in Mooncake's paper
# (FAST'25, section 2.2).
LLAMA3_70B = ModelSpec(80, 8192, 64, 8, 128, 28672, 128256)
# Llama 2, arXiv 2307.09288, and config.json of Llama-2-70b.
LLAMA2_70B = ModelSpec(80, 8192, 64, 8, 128, 28672, 32000)
# LLaMA, arXiv 2302.13971, table 2; its MLP is 2/3 of 4 * 5120, rounded up to 13824.
LLAMA_13B = ModelSpec(40, 5120, 40, 40, 128, 13824, 32000)

# A node of Mooncake's evaluation (FAST'25): 8 A800 of 80 GB, 4 NICs of 200 Gbit/s.
# A800 SXM: 312 TFLOPS in bf16, 2,039 GB/s (NVIDIA's data sheet of the A100, which it equals here).
A800_X8 = MachineSpec(
    flops=8 * 312e12,
    memory_bytes_per_s=8 * 2.039e12,
    memory_bytes=8 * 80e9,
    nic_bytes_per_s=4 * 200e9 / 8,
)
