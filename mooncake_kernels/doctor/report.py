"""Findings as a table for people, and as JSON for programs."""

import json
from collections import Counter

from .examine import TOPICS, topic_of
from .finding import Finding, State

_BAD = (State.PROBLEM, State.WARNING)
_MAX_SUBJECTS = 3


def summary(findings: list[Finding]) -> str:
    """Format "3 problems, 2 warnings", and what could not be checked."""
    counts = Counter(finding.state for finding in findings)
    words = [_counted(counts[State.PROBLEM], "problem"), _counted(counts[State.WARNING], "warning")]
    if counts[State.UNKNOWN]:
        words.append(f"{counts[State.UNKNOWN]} unknown")
    return ", ".join(words)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def table(findings: list[Finding]) -> str:
    """Format problems, then warnings, then the rest by group; then the summary."""
    lines = []
    for state in _BAD:
        for finding in findings:
            if finding.state is state:
                lines += _bad(finding)
    rest = [finding for finding in findings if finding.state not in _BAD]
    for topic in TOPICS:
        of_topic = [finding for finding in rest if topic_of(finding) == topic.name]
        if of_topic:
            lines += [topic.name, *_rows(of_topic), ""]
    return "\n".join([*lines, summary(findings)]) + "\n"


def _bad(finding: Finding) -> list[str]:
    lines = [f"{finding.state.value:8} {finding.check}: {finding.subject}: {finding.detail}"]
    lines.append(f"{'':8} why: {finding.why}")
    if finding.fix:
        lines.append(f"{'':8} fix: {finding.fix}")
    return [*lines, ""]


def _rows(findings: list[Finding]) -> list[str]:
    """Format findings that differ only in their subject as one line."""
    merged: dict[tuple[str, State, str, str | None], list[Finding]] = {}
    for finding in findings:
        alike = (finding.check, finding.state, finding.detail, finding.fix)
        merged.setdefault(alike, []).append(finding)
    cells = [
        (state.value, check, _subjects(of_row), detail, fix)
        for (check, state, detail, fix), of_row in merged.items()
    ]
    wide = max(len(check) for _, check, _, _, _ in cells)
    wider = max(len(subject) for _, _, subject, _, _ in cells)
    return [
        f"  {state:8}{check:{wide}}  {subject:{wider}}  {detail}{f'; {fix}' if fix else ''}"
        for state, check, subject, detail, fix in cells
    ]


def _subjects(findings: list[Finding]) -> str:
    names = [finding.subject for finding in findings]
    if len(names) > _MAX_SUBJECTS:
        return f"{', '.join(names[: _MAX_SUBJECTS - 1])} and {len(names) - _MAX_SUBJECTS + 1} more"
    return ", ".join(names)


def as_json(findings: list[Finding]) -> str:
    """Format an object: "findings", a list of objects with fixed keys, and "summary"."""
    counts = Counter(finding.state for finding in findings)
    return json.dumps(
        {
            "findings": [
                {
                    "group": topic_of(finding),
                    "check": finding.check,
                    "subject": finding.subject,
                    "state": finding.state.value,
                    "detail": finding.detail,
                    "fix": finding.fix,
                    "why": finding.why,
                }
                for finding in findings
            ],
            "summary": {state.value: counts[state] for state in State},
        },
        indent=2,
    )
