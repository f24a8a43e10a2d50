"""An engine of vLLM on a CPU that imports ``mooncake``: prompts come as lines of JSON, and results
go. Run by test_mooncake_in_vllm.py in an environment with vLLM, not the one of the tests.

It is also a plugin of vLLM's, for what vLLM's connectors for Mooncake expect of a GPU.
"""

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip


class Event:
    """A CUDA event without CUDA."""

    def __init__(self, *_args, **_options): ...

    def record(self, *_args): ...

    def synchronize(self): ...

    def wait(self, *_args): ...

    def query(self):
        return True


def register() -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.Event = Event


def main() -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        kv_transfer_config={
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    answer("ready")
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": tokens} for tokens in json.loads(line)]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answer([[out.num_cached_tokens, list(out.outputs[0].token_ids)] for out in outputs])
    engine.llm_engine.engine_core.shutdown()


def answer(value) -> None:
    sys.stdout.write(f"ANSWER {json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
