"""Prefill in one process, decode in another; the KV blocks move between them and change layout.

Needs the extra ``serving`` and a model: SmolLM2, which `make demo` installs, or the folder given.
"""

import sys

from mooncake_serving.engine import SamplingParams, load_model
from mooncake_serving.engine.disaggregated import Cluster, Job, WorkerOptions


def main(model: str | None) -> None:
    ours = {"model": model} if model else {}
    options = WorkerOptions(num_blocks=64, num_staging_blocks=32, **ours)
    _, tokenizer = load_model(*ours.values())
    prompts = [tokenizer.encode(text) for text in ("The KV cache is", "Paged attention is")]
    params = SamplingParams(max_tokens=8)
    answers: dict = {}
    with Cluster(options) as cluster:
        cluster.wait_until_ready()
        for token in cluster.run([Job(prompt, params) for prompt in prompts]):
            answers.setdefault(token.request_id, []).append(token.token_id)
        for step in cluster.life.rows():
            print(f"{step.name:<12}{step.num_bytes:>12} bytes {step.seconds * 1e6:>12.0f} us")
    for index, token_ids in sorted(answers.items()):
        print(index, repr(tokenizer.decode(token_ids)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
