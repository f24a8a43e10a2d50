"""The code of docs/chunking.md runs."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs/chunking.md").read_text()


def test_the_pages_code_runs() -> None:
    names: dict[str, object] = {}
    blocks = list(re.finditer(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert len(blocks) == 3
    for block in blocks:
        lines_before = "\n" * PAGE.count("\n", 0, block.start(1))
        exec(compile(lines_before + block[1], "docs/chunking.md", "exec"), names)
