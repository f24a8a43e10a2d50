"""One finding of the doctor: what, in what state, what it breaks, and the command to fix it."""

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """The severity of a finding, worst first.

    A *problem* keeps something from working; a *warning* makes it slower or less safe; *unknown*
    could not be checked; *info* is neither good nor bad (hardware that is absent).
    """

    PROBLEM = "problem"
    WARNING = "warning"
    UNKNOWN = "unknown"
    INFO = "info"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """A check's result for one subject.

    Attributes:
        check: the check's name, as ``--only`` takes it.
        subject: the device, file or process it is about.
        state: how bad it is.
        detail: what was seen, and what was expected.
        fix: the command to run; None if there is nothing to do.
        why: what breaks without it, in one sentence.
    """

    check: str
    subject: str
    state: State
    detail: str
    fix: str | None
    why: str


@dataclass(frozen=True)
class Topic:
    """A group of checks implemented by one function.

    Attributes:
        name: of the group.
        why: for each of its checks, what breaks without it.
    """

    name: str
    why: dict[str, str]

    def found(
        self, check: str, subject: str, state: State, detail: str, fix: str | None = None
    ) -> Finding:
        return Finding(check, subject, state, detail, fix, self.why[check])

    def ok(self, check: str, subject: str, detail: str) -> Finding:
        return self.found(check, subject, State.OK, detail)

    def info(self, check: str, subject: str, detail: str, fix: str | None = None) -> Finding:
        return self.found(check, subject, State.INFO, detail, fix)

    def unknown(self, check: str, subject: str, detail: str, fix: str | None = None) -> Finding:
        return self.found(check, subject, State.UNKNOWN, detail, fix)

    def warning(self, check: str, subject: str, detail: str, fix: str | None = None) -> Finding:
        return self.found(check, subject, State.WARNING, detail, fix)

    def problem(self, check: str, subject: str, detail: str, fix: str | None = None) -> Finding:
        return self.found(check, subject, State.PROBLEM, detail, fix)
