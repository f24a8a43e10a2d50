"""Plain text on a terminal, or wherever the demo's output goes."""

import textwrap
from collections.abc import Sequence
from typing import TextIO

from mooncake_serving.serve.table import aligned

WIDTH = 100
BOLD, NORMAL = "\x1b[1m", "\x1b[0m"


class Screen:
    """Writes numbered sections of wrapped text and tables, each at once.

    Args:
        output: where to; only if that is a terminal, headings are bold.
    """

    def __init__(self, output: TextIO):
        self._output = output
        self._num_sections = 0

    def head(self, title: str) -> None:
        """Begin a section."""
        self._num_sections += 1
        text = f"{self._num_sections}. {title}"
        self._write("\n" + (f"{BOLD}{text}{NORMAL}" if self._output.isatty() else text))

    def say(self, text: str, *, indent: int = 0) -> None:
        """Write a paragraph."""
        self._write(
            textwrap.fill(
                text,
                WIDTH,
                initial_indent=" " * indent,
                subsequent_indent=" " * (indent and indent + 2),
                break_on_hyphens=False,
            )
        )

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Write rows of equally many cells."""
        self._write(textwrap.indent(aligned(rows), "    "))

    def _write(self, text: str) -> None:
        self._output.write(text + "\n")
        self._output.flush()
