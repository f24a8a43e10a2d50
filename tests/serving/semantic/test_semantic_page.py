"""The code of docs/serving/semantic.md runs, and its loops are what the functions do."""

import math

import pytest
import torch

from mooncake_serving.semantic import Recompute, rows_by_layer, with_context
from tests.pages import run_block


def test_documented_example_runs(deep, draw, capsys):
    report = draw(480, 1)
    short = "SemanticCache(engine, num_blocks=256, min_tokens=0)"
    names = {"model": deep, "report": report, "edited_report": report[:300] + report[303:]}
    run_block("serving/semantic", 0, names, {"SemanticCache(engine, num_blocks=256)": short})
    assert names["reuse"].prompt_id == names["prompt_id"] == 0
    assert names["reuse"].num_exact_tokens == 300
    counts = str(names["reuse"].computed_by_layer)
    assert capsys.readouterr().out.splitlines()[1] == counts
    assert names["outputs"] and not names["engine"].has_work


def test_documented_context_matches_the_signer():
    embeddings = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    names = {"embeddings": embeddings, "num_tokens": 20, "placed": torch.zeros(20, 16)}
    run_block("serving/semantic", 1, names)
    torch.testing.assert_close(names["placed"], with_context(embeddings, 8, 0.6))


@pytest.mark.parametrize("full_layers", [1, 2])
def test_documented_loop_chooses_the_same_rows(full_layers):
    recompute = Recompute(full_layers=full_layers, share=0.5, decay=0.6, floor=0.2)
    deviation = torch.rand(20, generator=torch.Generator().manual_seed(0))
    is_matched = torch.tensor([True] * 12 + [False] * 3 + [True] * 5)
    seen = []
    names = {
        "num_layers": 6, "rows": list(range(20)), "ceil": math.ceil,
        "norm": abs, "fresh_k": 0, "reused_k": 0, "fresh_v": 0, "reused_v": 0,
        "matched": [i for i in range(19) if is_matched[i]],
        "unmatched": [12, 13, 14], "last_tokens": [19],
        "write_keys_and_values": lambda layer, rows: None,
        "attend_and_feed_forward": lambda layer, rows: seen.append(sorted(rows)),
        "full_layers": full_layers, "share": 0.5, "decay": 0.6, "floor": 0.2, "given": deviation,
    }  # fmt: skip
    run_block("serving/semantic", 2, names, {"key=deviation": "key=lambda i: float(given[i])"})
    assert seen == [r.tolist() for r in rows_by_layer(deviation, is_matched, 6, recompute)]
