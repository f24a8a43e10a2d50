"""The code of docs/serving/engine.md runs, with a small model."""

from tests.pages import blocks_of, run_block


def test_documented_code_runs(tiny_folder, capsys):
    model = repr(str(tiny_folder))
    names = run_block("serving/engine", 0, {}, {"load_model()": f"load_model({model})"})
    assert names["here"].allocator.num_free == names["there"].allocator.num_free == 64
    assert names["text"] == names["tokenizer"].decode(names["generation"].token_ids)
    run_block("serving/engine", 1, names, {"WorkerOptions()": f"WorkerOptions(model={model})"})
    names["main"]([names["prompt"]] * 2, names["params"])
    lines = capsys.readouterr().out.splitlines()
    answers = [[line for line in lines if line.split()[0] == job] for job in "01"]
    for job, answer in zip("01", answers, strict=True):
        assert answer == [f"{job} {token_id}" for token_id in names["generation"].token_ids]
    assert lines[-1].startswith("attended ")
    assert len(blocks_of("serving/engine")) == 2
