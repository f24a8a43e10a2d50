"""The programs of examples/ run on a CPU and print what they should; the page lists all of them."""

import ast
import re
import subprocess
import sys

import pytest

from .pages import ROOT

EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
# What each prints, as a pattern.
PRINTS = {
    "attention": "agree",
    "cluster": r"num_made=4(.|\n)*has_left=True",
    "copy_layouts": "fp8 is within 0",
    "layer_by_layer": "4 layers",
    "masks": "514 queries",
    "rdma": "no RDMA here|4,096 bytes were written",
    "simulator": "KVCacheCentric: TTFT",
    "store": r"found 3 of 4 blocks: \[0, 1, 2\]",
    "tp_reshard": "to rank 2 of 4",
    "two_processes": "went by",
    "vllm_prefix_cache": "vLLM is not installed|usage",
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_it_runs(name):
    command = [sys.executable, EXAMPLES[name]]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    # Where vLLM is installed, its example wants a model.
    assert ran.returncode == 0 or "usage" in ran.stderr, ran.stderr
    assert re.search(PRINTS[name], ran.stdout + ran.stderr), ran.stdout


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_it_is_short_and_has_a_docstring(name):
    text = EXAMPLES[name].read_text()
    assert 15 <= text.count("\n") <= 60
    assert ast.get_docstring(ast.parse(text))


def test_there_are_few_and_the_page_lists_them():
    page = (ROOT / "docs/start/examples.md").read_text()
    assert len(EXAMPLES) <= 12
    assert sorted(re.findall(r"\]\(\.\./\.\./examples/(\w+)\.py\)", page)) == sorted(EXAMPLES)
