"""``python -m mooncake_serving demo``: see each command's ``--help``."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    try:
        return run_command(arguments)
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        package = missing.name.partition(".")[0]
        sys.stderr.write(
            f"error: {package} is not installed: pip install 'mooncake-kernels[demo]'\n"
        )
        return 1


def run_command(arguments: list[str] | None) -> int:
    from . import demo  # needs packages of an extra

    parser = argparse.ArgumentParser(prog="python -m mooncake_serving")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(commands.add_parser("demo", help=demo.SUMMARY, description=demo.SUMMARY))
    return demo.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
