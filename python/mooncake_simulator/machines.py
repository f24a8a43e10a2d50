"""The models and machines of the papers, in numbers; each with its source."""

from dataclasses import dataclass

from mooncake_serving.conductor import InvalidArgument


@dataclass(frozen=True)
class Model:
    """A dense decoder-only model in 16 bit."""

    name: str
    num_params: float
    num_layers: int
    hidden_size: int  # of the query: heads * head dim
    kv_hidden_size: int  # of the key, and of the value: KV heads * head dim

    @property
    def weight_bytes(self) -> float:
        """Size of all weights, which are read once per step."""
        return 2 * self.num_params

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's keys and values in all layers."""
        return 2 * 2 * self.kv_hidden_size * self.num_layers


@dataclass(frozen=True)
class Machine:
    """One instance: GPUs that run one copy of the model together.

    Attributes:
        flops_per_s: of all its GPUs, dense, 16 bit; ``memory_bytes_per_s``: likewise of HBM.
        memory_bytes: HBM of all its GPUs.
        dram_bytes: host memory given to the KV store, unless specified otherwise.
        host_bytes_per_s: between host memory and GPUs, of each direction.
        nic_bytes_per_s: of the network, of each direction; 0 for none.
        ssd_bytes_per_s: reading.
        math_efficiency: share of ``flops_per_s`` that large matrix products reach.
        attention_efficiency: share of it that prefill attention reaches.
        memory_efficiency: share of ``memory_bytes_per_s`` that a step's reads reach.
        step_s: additional cost of a step: launches, all-reduces, sampling, the host.
        memory_share: of the HBM that weights and KV may take.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    math_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    step_s: float = 0.0
    dram_bytes: float = 0.0
    host_bytes_per_s: float = 1.0
    nic_bytes_per_s: float = 0.0
    ssd_bytes_per_s: float = 1.0
    memory_share: float = 0.9  # vLLM's default gpu_memory_utilization

    def kv_capacity_tokens(self, model: Model) -> int:
        """Tokens whose KV fits into HBM next to the weights.

        Raises:
            InvalidArgument: the weights alone do not fit, or it is another module's model.
        """
        if not isinstance(model, Model):
            raise InvalidArgument(
                f"Machine: model must be a Model of {__name__}, got {type(model).__name__}"
            )
        room = self.memory_bytes * self.memory_share - model.weight_bytes
        if room < model.kv_bytes_per_token:
            raise InvalidArgument(
                f"Machine: model must fit into {self.memory_share * self.memory_bytes / 1e9:.0f} "
                f"GB of {self.name}, got {model.name} with {model.weight_bytes / 1e9:.0f} GB"
            )
        return int(room // model.kv_bytes_per_token)


# Dimensions: Touvron et al. 2023 (LLaMA, Table 2; Llama 2, section 2.2), Dubey et al. 2024 (Llama
# 3, Table 3), Brown et al. 2020 (GPT-3, Table 2.1), 01.AI 2024 (Yi, Table 1).
LLAMA3_70B = Model("LLaMA3-70B", 70.6e9, 80, 8192, 1024)
LLAMA2_70B = Model("LLaMA2-70B", 69.0e9, 80, 8192, 1024)
LLAMA2_7B = Model("LLaMA2-7B", 6.74e9, 32, 4096, 4096)
LLAMA2_13B = Model("LLaMA2-13B", 13.0e9, 40, 5120, 5120)
LLAMA_13B = Model("LLaMA-13B", 13.0e9, 40, 5120, 5120)
LLAMA_33B = Model("LLaMA-33B", 32.5e9, 60, 6656, 6656)
GPT3_175B = Model("GPT-3", 175e9, 96, 12288, 12288)
YI_34B = Model("Yi-34B", 34.4e9, 60, 7168, 1024)

# Mooncake's nodes (FAST'25, section 5.1): 8 A800-SXM4-80GB, 4 NICs of 200 Gbps; B_h2d 128 GB/s and
# 312 TFLOPS a GPU (section 2.2); HBM 2,039 GB/s (NVIDIA's data sheet); 1 TB of DRAM is 3 million
# tokens (section 5.3.1). ASSUMED, since no paper gives them: the efficiencies of TP 8, 10 ms a step
# (160 all-reduces of 20 us, launches and a Python scheduler), and 4 NVMe disks of 6 GB/s.
A800_NODE = Machine(
    "8xA800-80G",
    flops_per_s=8 * 312e12,
    memory_bytes_per_s=8 * 2.039e12,
    memory_bytes=8 * 80e9,
    math_efficiency=0.5,
    attention_efficiency=0.4,
    memory_efficiency=0.75,
    step_s=0.010,
    dram_bytes=3e6 * LLAMA3_70B.kv_bytes_per_token,
    host_bytes_per_s=128e9,
    nic_bytes_per_s=800e9 / 8,
    ssd_bytes_per_s=24e9,
)

# The A6000 and the A100 have PCIe 4.0 x16, 32 GB/s in each direction (NVIDIA's data sheets).
# ASSUMED, since no paper needs it: an NVMe disk of 6 GB/s.
ONE_GPU_HOST = {"host_bytes_per_s": 32e9, "ssd_bytes_per_s": 6e9}

# NVIDIA's data sheet: 154.8 TFLOPS in fp16 with fp32 sums, 768 GB/s, 48 GB. FITTED on SARATHI
# (arXiv:2308.16369), Table 2, three figures: linear operators of 1,024 prefill tokens 224.8 ms
# (math), of 4 decodes 44.28 ms (memory), attention of that prefill 10 ms.
A6000 = Machine(
    "A6000",
    flops_per_s=154.8e12,
    memory_bytes_per_s=768e9,
    memory_bytes=48e9,
    math_efficiency=0.780,
    attention_efficiency=0.278,
    memory_efficiency=0.765,
    **ONE_GPU_HOST,
)

# One A100-SXM4-80GB; NVIDIA's data sheet. ASSUMED: the efficiencies fitted for the A6000.
A100 = Machine(
    "A100-80G",
    flops_per_s=312e12,
    memory_bytes_per_s=2.039e12,
    memory_bytes=80e9,
    math_efficiency=0.780,
    attention_efficiency=0.278,
    memory_efficiency=0.765,
    **ONE_GPU_HOST,
)

MODELS = {
    model.name: model
    for model in (
        LLAMA3_70B, LLAMA2_70B, LLAMA2_7B, LLAMA2_13B, LLAMA_13B, LLAMA_33B, GPT3_175B, YI_34B,
    )
}  # fmt: skip
MACHINES = {machine.name: machine for machine in (A800_NODE, A6000, A100)}


def group(machine: Machine, num_gpus: int, *, step_s: float = 0.0) -> Machine:
    """Join GPUs by tensor parallelism: rates and memory add up, and a step costs ``step_s``."""
    from dataclasses import replace

    return replace(
        machine,
        name=f"{num_gpus}x{machine.name}",
        flops_per_s=num_gpus * machine.flops_per_s,
        memory_bytes_per_s=num_gpus * machine.memory_bytes_per_s,
        memory_bytes=num_gpus * machine.memory_bytes,
        step_s=step_s,
    )
