"""Two vLLM engines share one prefix cache: what the first has computed, the second loads.

Needs vLLM (0.32 for the CPU was tested), the extra ``store``, and a model as its argument.
"""

import importlib.util
import sys

CONFIG = {
    "kv_connector": "MooncakeKernelsConnector",  # by this package's plugin of vLLM
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"url": "shm:/dev/shm/kv-example?size=1GiB"},
}


def generate(model: str) -> None:
    from vllm import LLM, SamplingParams

    prompt = "The KV cache of a prompt is computed once. " * 40
    engine = LLM(model, kv_transfer_config=CONFIG)
    [answer] = engine.generate([prompt], SamplingParams(max_tokens=16, temperature=0))
    print(answer.outputs[0].text)
    print(f"{answer.num_cached_tokens} tokens came from the store")  # 0 in the first process


if __name__ == "__main__":
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed; the options of the engine would be:", CONFIG)
    elif len(sys.argv) != 2:
        sys.exit("usage: vllm_prefix_cache.py MODEL (twice: the second run finds what is stored)")
    else:
        generate(sys.argv[1])
