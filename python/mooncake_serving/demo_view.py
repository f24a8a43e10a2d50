"""The demo's output on a terminal."""

import argparse
import textwrap

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from .engine.disaggregated import STEPS, Job, Step

COPIES = ("gathered", "moved", "scattered")  # the steps for which GB/s is meaningful


class View:
    """Progress bars while weights load, then the answers as they come, then the table.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool):
        self._console = Console(quiet=quiet, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description:>16}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} tensors"),
            console=self._console,
        )
        self._bars: dict[str, TaskID] = {}
        self._answers: list[tuple[str, Text]] = []
        self._live = Live(console=self._console, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> "View":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def loading(self, name: str, done: int, total: int) -> None:
        """Update a process's progress bar."""
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._bars[name], completed=done)

    def begin(self, prompts: list[str]) -> None:
        """Show the prompts."""
        self._answers = [
            (textwrap.shorten(prompt, 100, placeholder=" ..."), Text()) for prompt in prompts
        ]

    def text(self, request_id: int, text: str) -> None:
        """Append to an answer."""
        self._answers[request_id][1].append(text)

    def checking(self) -> None:
        """Show that the reference run has begun."""
        self._live.stop()  # the answers stay where they are
        if not self._console.is_terminal:
            self._console.line()  # Live does so on a terminal only
        self._console.print("Now the same prompts in a single process ...")

    def verdict(
        self, life: list[Step], jobs: list[Job], same: list[bool], options: argparse.Namespace
    ) -> None:
        """Print the life of the blocks, and whether the tokens agree."""
        num_tokens = sum(len(job.prompt_tokens) for job in jobs)
        table = Table(title=f"The life of the KV blocks of {num_tokens} prompt tokens")
        table.add_column("step")
        table.add_column("state")
        for unit in ("bytes", "us", "GB/s"):
            table.add_column(unit, justify="right")
        for step in life:
            speed = f"{step.num_bytes / step.seconds / 1e9:.3g}" if step.name in COPIES else ""
            us = f"{step.seconds * 1e6:,.0f}"
            table.add_row(step.name, STEPS[step.name], f"{step.num_bytes:,}", us, speed)
        self._console.print(table)
        self._console.print(
            f"Prefill and decode were two processes on {options.device}, with different cache "
            f"layouts, and {options.transport} between them."
        )
        if all(same):
            answers = "The answer has" if len(same) == 1 else f"All {len(same)} answers have"
            self._console.print(f"{answers} the same tokens as in a single process.")

    def _render(self) -> Group:
        parts: list = [self._progress] if self._bars and not self._answers else []
        parts += [
            Panel(answer, title=Text(prompt), title_align="left")
            for prompt, answer in self._answers
        ]
        return Group(*parts)
