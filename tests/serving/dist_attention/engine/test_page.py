"""The code of docs/serving/dist_attention.md runs, with a small model."""

from mooncake_serving.engine import Engine, PagedKVCache
from tests.pages import run_block


def test_documented_code_runs(tiny_folder):
    model_of_ours = {"load_model()": f"load_model({str(tiny_folder)!r})"}
    names = run_block("serving/dist_attention", 0, {}, model_of_ours)
    model = names["model"]
    [want] = Engine(model, PagedKVCache(model.config, 20)).generate(
        [names["prompt"]], names["params"]
    )
    assert names["answer"] == want.token_ids
    run_block("serving/dist_attention", 1, names)  # its processes: test_cluster
    assert callable(names["main"])
