"""What can be wrong with a trace."""


class InvalidTrace(ValueError):
    """A trace is not what its format says: ``<file>, line <n>: <what>``.

    Attributes:
        source: the file.
        line: counted from 1, its header included.
    """

    def __init__(self, source: str, line: int, what: str):
        self.source, self.line = source, line
        super().__init__(f"{source}, line {line}: {what}")
