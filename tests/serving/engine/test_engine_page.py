"""The code of docs/serving/engine.md runs, with a small model."""

from tests.pages import blocks_of, run_block


def test_documented_code_runs(tiny_folder):
    model = repr(str(tiny_folder))
    names = run_block("serving/engine", 0, {}, {"load_model()": f"load_model({model})"})
    assert names["here"].allocator.num_free == names["there"].allocator.num_free == 64
    assert names["text"] == names["tokenizer"].decode(names["generation"].token_ids)
    assert len(blocks_of("serving/engine")) == 1
