"""``python -m mooncake_serving serve | demo``: see each command's ``--help``."""

import argparse
import importlib
import sys

from mooncake_kernels.command_line import run_command

from .demo import options as demo_options
from .serve import options as serve_options


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_serving")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help=serve_options.SUMMARY,
        description=serve_options.SUMMARY,
        epilog=serve_options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serve_options.add_commands(serve)
    summary = demo_options.SUMMARY
    demo_options.add_arguments(commands.add_parser("demo", help=summary, description=summary))
    options = parser.parse_args(arguments)
    module = "demo.command" if options.command == "demo" else f"serve.{options.module}"
    extra = "serving,router" + (",ray" if getattr(options, "cluster", "") == "ray" else "")
    return run_command(lambda: _run(module, options), extra=extra, errors=(RuntimeError,))


def _run(module: str, options: argparse.Namespace) -> int:
    """Run a command's module: it needs packages of an extra, which ``--help`` does not."""
    status: int = importlib.import_module(f"mooncake_serving.{module}").run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
