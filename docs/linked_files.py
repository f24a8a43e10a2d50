"""A hook of MkDocs: files of the repository that pages link to are part of the site.

A link that leaves docs/, such as ../bench/results/transfer.jsonl, leads to a copy below files/. One
that leads to no file stays as it is, which MkDocs reports: the build is strict.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((\.\./[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown, *, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link):
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        if path.startswith("docs/") or not (ROOT / path).is_file():
            return link[0]
        copy = f"files/{path}"
        if path.endswith(".md"):
            copy += ".txt"  # not a page: its links are those of the repository
        if copy not in files.src_uris:
            content = (ROOT / path).read_bytes()
            files.append(File.generated(config, copy, content=content))
        return f"]({os.path.relpath(copy, folder or '.')})"

    return LINK.sub(inside, markdown)
