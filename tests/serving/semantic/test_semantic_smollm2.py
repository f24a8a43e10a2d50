"""On the real model, the gain comes from the method: more than from any reused keys and values."""

import runpy
from pathlib import Path

import pytest

from mooncake_serving.engine import Batch, Chunk, Engine, PagedKVCache, SemanticCache
from mooncake_serving.semantic import Recompute, SignatureIndex, Signer

TEXTS = runpy.run_path(str(Path(__file__).parents[3] / "bench/lib/semantic_texts.py"))
REPORT, OTHER = ("\n\n".join(TEXTS[name][:2]) for name in ("REPORT", "OTHER"))
NEW = f"{TEXTS['INSERTED']}\n\n{REPORT}"
ANSWER = " The miller waited until the water had fallen, and then he could grind for five hours."


@pytest.fixture(scope="module")
def outcomes(smollm2):
    """By side: how far an answer's distributions are from a full prefill's, and what was reused."""
    model, tokenizer = smollm2
    new, answer = tokenizer.encode(NEW), tokenizer.encode(ANSWER)
    engine = Engine(model, PagedKVCache(model.config, 48))

    def along_the_answer(block_ids):
        held = [*block_ids, *engine.allocator.allocate(2)]
        chunk = Chunk([new[-1], *answer[:-1]], len(new) - 1, held)
        logits = engine.model.forward(Batch.build([chunk], 16), engine.cache, all_logits=True)
        engine.release(held)
        return logits.double().log_softmax(-1)

    def outcome(kept, options):
        cache = SemanticCache(engine, 16, threshold=0, min_tokens=0, **options)
        cache.keep(kept, blocks_of[kept])
        done, reuse, _ = cache.prefill(new)
        assert reuse.prompt_id == 0
        got = along_the_answer(done.block_ids)
        return float((full.exp() * (full - got)).sum(-1).mean()), reuse

    def anywhere():  # by default, a wrong prompt's tokens are left alone: they follow others
        return SignatureIndex(256, max_placed_distance=256)

    full = along_the_answer(engine.prefill(new).block_ids)
    report, other = (tuple(tokenizer.encode(text)) for text in (REPORT, OTHER))
    blocks_of = {kept: engine.prefill(kept).block_ids for kept in (report, other)}
    return {
        "ours": outcome(report, {}),
        "wrong": outcome(other, {"index": anywhere()}),
        "untouched": outcome(report, {"recompute": Recompute(share=0)}),
        "whole": outcome(report, {"recompute": Recompute(share=1, decay=1)}),
        "rotary": outcome(
            report,
            {
                "signer": Signer(model.config.hidden_size, order="rotary"),
                "index": anywhere(),
            },
        ),
    }


def test_similar_keys_and_values_are_nearly_as_good_as_fresh_ones(outcomes):
    ours, reuse = outcomes["ours"]
    computed = sum(reuse.computed_by_layer) / len(reuse.computed_by_layer)
    assert reuse.is_approximate and computed < 0.5 * reuse.computed_by_layer[0]
    wrong, reuse_of_wrong = outcomes["wrong"]
    assert reuse_of_wrong.similarity < 0.3 < reuse.similarity
    assert ours < wrong / 3


def test_recomputing_helps_and_full_share_equals_full_prefill(outcomes):
    assert outcomes["untouched"][0] > outcomes["ours"][0] > outcomes["whole"][0]
    assert outcomes["whole"][0] < 1e-6


def test_tokens_are_matched_better_by_context_than_by_position(outcomes):
    assert outcomes["ours"][0] < outcomes["rotary"][0] / 1.5
