"""The Python code of the documentation's pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks_of(page: str) -> list[str]:
    """With empty lines before, so that an error names the line of the page."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found = re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def run_block(page: str, index: int, names: dict, replaced: dict[str, str] | None = None) -> dict:
    """Run a block of a page, with other texts in place of some of its own; return its names."""
    code = blocks_of(page)[index]
    for text, by in (replaced or {}).items():
        assert text in code, f"{page}: {text}"
        code = code.replace(text, by)
    exec(compile(code, f"docs/{page}.md", "exec"), names)
    return names
