"""The Python code of the documentation's pages.

A block runs in some test, which names it literally: ``run_block("store/ssd", 0, ...)``, or
``run_page("kernels/engines", ...)`` for all of a page; tests/test_doc_pages.py counts them. A block
that cannot run on this machine has a line before it that says what it needs:

    <!-- not run here: needs a GPU -->
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:<!-- not run here: needs ([^\n]+) -->\n)?```python\n(.*?)```", re.DOTALL)


def _found(page: str) -> list[tuple[str | None, str]]:
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python"), f"{page}: a block that is not closed, or nested"
    # With empty lines before, so that an error names the line of the page.
    return [(block[1], "\n" * text.count("\n", 0, block.start(2)) + block[2]) for block in blocks]


def blocks_of(page: str) -> list[str]:
    return [code for _, code in _found(page)]


def needs_of(page: str) -> dict[int, str]:
    """What the blocks that cannot run here need, by their index."""
    return {index: needs for index, (needs, _) in enumerate(_found(page)) if needs}


def run_block(page: str, index: int, names: dict, replaced: dict[str, str] | None = None) -> dict:
    """Run a block of a page, with other texts in place of some of its own; return its names."""
    code = blocks_of(page)[index]
    for text, by in (replaced or {}).items():
        assert text in code, f"{page}: {text}"
        code = code.replace(text, by)
    exec(compile(code, f"docs/{page}.md", "exec"), names)
    return names


def run_page(page: str, names: dict) -> dict:
    """Run all blocks of a page, one after the other; return their names."""
    for index in range(len(blocks_of(page))):
        run_block(page, index, names)
    return names
