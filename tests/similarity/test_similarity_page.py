"""The code of docs/kernels/similarity.md runs, and does what the page says."""

import pytest
import torch

import mooncake_kernels as mk

from ..pages import run_block


def differing_bits(a, b):
    return sum((x ^ y).bit_count() for x, y in zip(a.tolist(), b.tolist(), strict=True))


def test_example_reuses_matched_keys_and_values():
    torch.manual_seed(1)
    names = run_block("kernels/similarity", 0, {})
    kept, prompt, index = names["kept"], names["prompt"], names["index"]
    is_old = torch.ones(148, dtype=torch.bool)
    is_old[80:88] = False
    assert (
        torch.equal(kept[index[is_old]], prompt[is_old]) and (names["distance"][is_old] == 0).all()
    )
    assert set(names["to_compute"].tolist()) <= set(range(80, 88))
    keys, values = names["view"].tensors[0].flatten(1, 2)
    copied, source = names["dst_slots"][is_old], index[is_old]
    assert torch.equal(values[copied], values[source])
    keys = torch.complex(*keys.double().unflatten(-1, (2, 32)).unbind(-2))
    frequencies = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    angles = (names["position"] - index)[is_old, None, None] * frequencies
    turned = keys[source] * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(keys[copied], turned, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3, 100])
def test_documented_loops_match_the_functions(window):
    generator = torch.Generator().manual_seed(window)
    embeddings, planes = (torch.randn(s, 16, generator=generator) for s in (12, 16))
    names = {
        "embeddings": embeddings, "planes": planes, "dot": torch.dot, "num_tokens": 12, "bits": 16,
        "sig": torch.zeros(12, 2, dtype=torch.uint8),
    }  # fmt: skip
    run_block("kernels/similarity", 1, names)
    sig = mk.simhash(embeddings, planes)
    assert torch.equal(names["sig"], sig)
    queries, references = sig[:9], sig[2:]
    index, distance = mk.hamming_match(queries, references, window=window, max_distance=6)
    names = {
        "num_queries": 9, "num_references": 10, "window": window, "max_distance": 6,
        "differing_bits": lambda i, j: differing_bits(queries[i], references[j]),
        "index": [0] * 9, "distance": [0] * 9,
    }  # fmt: skip
    run_block("kernels/similarity", 2, names)
    assert index.tolist() == names["index"] and distance.tolist() == names["distance"]
