"""The code of docs/pooling.md runs, with a small model."""

import re
from pathlib import Path

from mooncake_serving.engine import Engine, PagedKVCache

PAGE = (Path(__file__).parents[3] / "docs/pooling.md").read_text()


def blocks():
    """With empty lines before, so that an error names the line of the page."""
    found = re.finditer(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return ["\n" * PAGE.count("\n", 0, block.start(1)) + block[1] for block in found]


def test_the_pages_code_runs(tiny_folder):
    two_engines, cluster = blocks()
    code = two_engines.replace("load_model()", f"load_model({str(tiny_folder)!r})")
    assert code != two_engines
    names = {}
    exec(compile(code, "docs/pooling.md", "exec"), names)
    model = names["model"]
    [want] = Engine(model, PagedKVCache(model.config, 20)).generate(
        [names["prompt"]], names["params"]
    )
    assert names["answer"] == want.token_ids
    exec(compile(cluster, "docs/pooling.md", "exec"), names)  # its processes: test_pooled_cluster
    assert callable(names["main"])
