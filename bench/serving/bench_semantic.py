"""Prefill from a similar prompt's keys and values (SemShareKV): time and quality; SmolLM2-135M.

A report of about 1,000 tokens is kept; versions of it are prefilled, from it and in full: with a
paragraph in front, with words edited, with paragraphs moved, rewritten from end to end.

Time: to the first token, `SemanticCache.prefill` with its defaults against `Engine.prefill`.

Quality, against the full prefill: the Kullback-Leibler divergence of the next token's
distribution, and of those along an answer of 93 tokens, on average; the answer's perplexity. Of:

  ours        as timed
  thorough    70 % of the tokens recomputed in every layer
  rotary      as timed, tokens matched by absolute position, as SemShareKV does
  untouched   nothing recomputed but the first layer and the last token: a control
  wrong       as timed, from a kept text on another topic: a control

Rotary and wrong match a token whatever it follows. By default, one that follows others has no
counterpart, and nearly all of a text on another topic is computed.

Facts, of the edited version: which of ten facts the next token states as edited (rather than as in
the kept report), and the probabilities of both, on average.

Needs the model of `make demo`.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib import semantic_texts as texts
from lib.harness import Case, LeftOut, arguments
from lib.table import report
from mooncake_serving.engine import (
    Batch,
    Chunk,
    Engine,
    ModelNotFound,
    PagedKVCache,
    SemanticCache,
    Tokenizer,
    load_model,
)
from mooncake_serving.semantic import Recompute, SignatureIndex, Signer

NUM_BLOCKS = 400  # of 16 tokens, of the engine and for kept prompts
QUICK_PARAGRAPHS = 2
ALL = Recompute(share=1, decay=1)


def anywhere() -> SignatureIndex:
    """Return an index that matches a token whatever it follows."""
    return SignatureIndex(256, max_placed_distance=256)


class Caches:
    """An engine, the same kept prompts behind several policies, and what each policy makes."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, num_paragraphs: int | None) -> None:
        self.engine, self.tokenizer, self.num_paragraphs = engine, tokenizer, num_paragraphs
        self.answer = tokenizer.encode(texts.ANSWER)
        self.ours = self.cache(texts.REPORT)
        self.others = {"wrong": self.cache(texts.OTHER, index=anywhere())}
        if num_paragraphs is not None:  # quick
            return
        rotary = Signer(engine.model.config.hidden_size, order="rotary")
        self.others |= {
            "thorough": self.cache(texts.REPORT, recompute=Recompute(share=0.7, decay=1)),
            "rotary": self.cache(texts.REPORT, signer=rotary, index=anywhere()),
            "untouched": self.cache(texts.REPORT, recompute=Recompute(share=0)),
        }

    def tokens(self, paragraphs: list[str], question: str = texts.QUESTION) -> list[int]:
        return self.tokenizer.encode(texts.join(paragraphs[: self.num_paragraphs], question))

    def cache(self, paragraphs: list[str], **options: Any) -> SemanticCache:
        cache = SemanticCache(self.engine, 80, threshold=0, min_tokens=0, **options)
        done, _, _ = cache.prefill(self.tokens(paragraphs), keep="exact")
        self.engine.release(done.block_ids)
        return cache

    def log_probabilities(self, tokens: list[int], block_ids: list[int]) -> torch.Tensor:
        """Return those of the next token and of each along the answer, and release the blocks."""
        engine, start = self.engine, len(tokens) - 1
        needed = engine.cache.num_blocks_for(start + len(self.answer)) - len(block_ids)
        block_ids = block_ids + engine.allocator.allocate(max(needed, 0))
        chunk = Chunk([tokens[-1], *self.answer[:-1]], start, block_ids)
        batch = Batch.build([chunk], engine.cache.block_size)
        logits = engine.model.forward(batch, engine.cache, all_logits=True)
        engine.release(block_ids)
        return logits.double().log_softmax(-1)

    def quality(self, tokens: list[int], full: torch.Tensor, cache: SemanticCache) -> dict:
        """Return the divergences from the full prefill, and what was reused."""
        done, reuse, _ = cache.prefill(tokens)
        got = self.log_probabilities(tokens, done.block_ids)
        divergence = (full.exp() * (full - got)).sum(-1)
        return {
            "kl_next": float(divergence[0]),
            "kl_answer": float(divergence.mean()),
            "perplexity": self.perplexity(got),
            "similarity": reuse.similarity,
            "exact_tokens": reuse.num_exact_tokens,
            "matched_tokens": reuse.num_matched_tokens,
            "computed_share": sum(reuse.computed_by_layer)
            / len(reuse.computed_by_layer)
            / len(tokens),
        }

    def facts(self, paragraphs: list[str], cache: SemanticCache) -> dict[str, float]:
        """Return how many facts are stated as edited, and how likely both words are."""
        pairs = []
        for question, *words in texts.FACTS:
            tokens = self.tokens(paragraphs, question)
            probabilities = self.log_probabilities(
                tokens, cache.prefill(tokens).prefilled.block_ids
            )[0].exp()
            pairs.append([float(probabilities[self.tokenizer.encode(w)[0]]) for w in words])
        original, edited = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        as_edited = sum(new > old for old, new in pairs)
        return {"as_edited": as_edited, "p_edited": edited, "p_original": original}

    def perplexity(self, log_probabilities: torch.Tensor) -> float:
        chosen = log_probabilities.gather(1, torch.tensor(self.answer)[:, None])
        return float((-chosen.mean()).exp())


def case(caches: Caches, name: str, paragraphs: list[str]) -> Case:
    tokens, engine = caches.tokens(paragraphs), caches.engine
    full = caches.log_probabilities(tokens, engine.prefill(tokens).block_ids)
    quality = {
        side: caches.quality(tokens, full, cache)
        for side, cache in {"ours": caches.ours, **caches.others}.items()
    }
    quality["full"] = {"perplexity": caches.perplexity(full)}
    if name == "words edited":
        exact = caches.cache(paragraphs, recompute=ALL)
        for side, cache in {"full": exact, "ours": caches.ours, **caches.others}.items():
            quality[side] |= caches.facts(paragraphs, cache)
    for side, figures in quality.items():
        words = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
        sys.stdout.write(f"  {name}: {side:9} {words}\n")

    def check() -> None:
        """All recomputed, it is the full prefill."""
        whole = caches.cache(texts.REPORT, recompute=ALL)
        assert caches.quality(tokens, full, whole)["kl_answer"] < 1e-6, "wrong, not timed"

    return Case(
        f"{name}, {len(tokens)} tokens",
        lambda: engine.release(caches.ours.prefill(tokens).prefilled.block_ids),
        {"full": lambda: engine.release(engine.prefill(tokens).block_ids)},
        check,
        fields={"tokens": len(tokens), "quality": quality},
    )


def cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    try:
        model, tokenizer = load_model()
    except ModelNotFound as error:
        yield LeftOut("all", str(error))
        return
    cache = PagedKVCache(model.config, NUM_BLOCKS)
    engine = Engine(model, cache, max_batch_tokens=2048)
    caches = Caches(engine, tokenizer, QUICK_PARAGRAPHS if options.quick else None)
    versions = list(texts.VERSIONS.items())
    for name, paragraphs in versions[:1] if options.quick else versions:
        yield case(caches, name, paragraphs)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("semantic", cases(options), options)
