"""``python -m mooncake_kernels``: diagnoses, measurements, servers, the drop-in; see ``--help``."""

import argparse
import json
import secrets
import sys
from pathlib import Path

from . import config, drop_in
from .command_line import run_command
from .errors import TransferError, Unavailable
from .topology import Topology
from .topology import cli as topology_cli
from .transfer import bandwidth


def calibrate(path: Path, *, quick: bool) -> None:
    """Measure the calibration table of this machine, line by line, and write it."""
    from .kv.calibrate import measure, replaced

    with replaced(path) as file:
        table = measure(quick=quick, report=lambda line: sys.stdout.write(line + "\n"))
        file.write(json.dumps(table, indent=1) + "\n")
    sys.stdout.write(f"written to {path}\n")


def probe(topology: Topology) -> None:
    """Probe which NICs reach which memory and record it in the topology."""
    from .reachability import probe_all

    for (location, nic), reason in probe_all(topology).items():
        if reason.startswith("not "):  # which says nothing of reach, and is not recorded
            sys.stderr.write(f"{nic} was not probed with {location}: {reason}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    return run_command(lambda: run(arguments), errors=(TransferError, Unavailable))


def run(arguments: list[str] | None) -> int:
    """The same, with what it raises."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what is wrong here, and what fixes it")
    doctor.add_argument("--json", action="store_true", help="print objects rather than a table")
    doctor.add_argument("--root", help="a captured machine's files, instead of this")
    doctor.add_argument("--only", help="groups or checks, with commas between")
    commands.add_parser("config", help="list the environment variables, as a Markdown table")
    measuring = commands.add_parser("calibrate", help='measure by what engine "auto" chooses')
    measuring.add_argument("--json", type=Path, help='the table; where "auto" looks if not given')
    measuring.add_argument("--quick", action="store_true", help="few sizes and few rounds")
    serving = commands.add_parser("metadata", help="serve names and addresses of engines by HTTP")
    serving.add_argument(
        "--host", help="address to listen on; the setting listen_host if not given"
    )
    serving.add_argument("--port", type=int, default=8080, help="port; 0 takes a free one")
    serving.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="answer to this name, too, besides addresses and this machine's name: engines whose "
        "URL has it are refused otherwise; may be repeated",
    )  # fmt: skip
    commands.add_parser("secret", help="make a secret for TransferEngine, of 256 random bits")
    topology_cli.add_parser(commands)
    bandwidth.add_parser(commands)
    drop_in.add_parser(commands)
    options = parser.parse_args(arguments)
    command = options.command
    if command == "doctor":
        from .doctor import command as doctor_command

        try:
            return doctor_command.run(options.root, options.only, as_objects=options.json)
        except argparse.ArgumentTypeError as error:
            doctor.error(str(error))
    if command == "topo":
        return topology_cli.run(options, probe)
    if command == "bandwidth":
        return bandwidth.run(options)
    if command == "drop-in":
        return drop_in.run(options)
    if command == "metadata":
        from .metadata import server

        host = options.host or config.current().listen_host
        return server.run(host, options.port, options.allow_host)
    if command == "calibrate":
        default = config.current().calibration
        if options.json is None and not default:
            measuring.error(
                '--json must be given where "auto" has no table: '
                "MOONCAKE_KERNELS_CALIBRATION is empty"
            )
        calibrate(options.json or Path(default).expanduser(), quick=options.quick)
        return 0
    if command == "secret":
        sys.stdout.write(secrets.token_hex() + "\n")
        return 0
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    lines += [f"| `{name}` | {default} | {doc} |" for name, default, doc in config.table()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
