"""Ctrl-C at any bytecode: the signal is raised there, and Python handles it where it would."""

import _thread
import signal
import sys
from collections.abc import Callable
from types import FrameType


class _Signal(int):
    pending = property(_thread.interrupt_main)  # not a call, after which it would be handled here


SIGINT = _Signal(signal.SIGINT)


class CtrlC:
    """While its ``with`` block runs, Ctrl-C comes before the ``count``-th bytecode of the files
    under ``folder``.

    Attributes:
        has_come: whether there were as many.
    """

    def __init__(self, folder: str, count: int):
        self.has_come = False
        self._folder = folder
        self._left = count
        self._before = sys.gettrace()  # that of tests/coverage

    def __enter__(self) -> "CtrlC":
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one only here
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable | None:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.has_come = True
                SIGINT.pending  # noqa: B018
        return self._trace
