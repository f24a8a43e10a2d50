"""in_guest, after its command line is parsed."""

import signal
import sys
import time

from . import fetch, options, run
from .errors import NoGuest


def main(arguments: list[str], description: str) -> int:
    """Do what the command line says and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    start = time.monotonic()
    chosen = options.parse(arguments, description)
    try:
        fetch.check_programs()
        kernel = fetch.kernel(chosen.cache, chosen.kernel)
        extra_path = [fetch.pyverbs(chosen.cache)]
        status = 0 if chosen.prepare else run.run(chosen, kernel, extra_path)
    except NoGuest as error:
        sys.stderr.write(f"in_guest: {error}\n")
        return run.DIED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if chosen.verbose:
        sys.stderr.write(f"in_guest: exit status {status}, {time.monotonic() - start:.1f} s\n")
    return status
