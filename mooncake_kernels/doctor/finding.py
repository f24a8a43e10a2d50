"""One thing that the doctor saw: what, in what state, what it breaks, and the command for it."""

import enum
from dataclasses import dataclass


class State(enum.Enum):
    """What is found, the worst first.

    A *problem* keeps something from working; a *warning* makes it slower or less safe; *unknown*
    could not be looked at; *info* is neither good nor bad (hardware that is not here).
    """

    PROBLEM = "problem"
    WARNING = "warning"
    UNKNOWN = "unknown"
    INFO = "info"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """What one check says of one subject.

    Attributes:
        check: the check's name, as ``--only`` takes it.
        subject: the device, file or process it is about.
        state: how bad it is.
        detail: what was seen, and what was expected.
        fix: the command to run; None if nothing is to be done.
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
    """A group of checks that one function makes.

    Attributes:
        name: of the group.
        why: for each check of it, what breaks without it.
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
