"""Errors in a trace."""


class InvalidTrace(ValueError):
    """A trace does not match its format: ``<file>, line <n>: <what>``.

    Attributes:
        source: the file.
        line: counted from 1, including its header.
    """

    def __init__(self, source: str, line: int, what: str):
        self.source, self.line = source, line
        super().__init__(f"{source}, line {line}: {what}")
