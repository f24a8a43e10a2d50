"""Signatures of token embeddings and their match, against FAISS and torch; 256 bits.

simhash: embeddings to signatures. torch is a float product, a comparison and a sum of weighted
bits; faiss is IndexLSH's encoding, whose rotation supplies the planes of all sides.

match: the nearest of all references, or of those in a window, from signatures. torch unpacks bits
to +-1, and takes the argmax of products, some queries at a time; faiss is IndexBinaryFlat's search,
which has no window.

lookup: from the queries' embeddings to their match: simhash and match, against IndexLSH's search.

Queries are the references in another order, with noise. faiss is left out on a GPU, and where
faiss-cpu is not installed.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, LeftOut, arguments
from lib.table import report

try:
    import faiss
except ImportError:
    faiss = None

BITS = 256
SIZES, QUICK_SIZES = [5_000, 20_000], [1_000]  # tokens of either side
DIMS, QUICK_DIMS = [576, 4096], [576]
WINDOW = 512
ROWS = 512  # of torch's products: more do not stay in the cache
SHARE = 1e-4  # of bits whose dot products may be too close to 0 for float32
Pair = tuple[torch.Tensor, torch.Tensor]


class Tokens:
    """References, and queries that are near to them, with the planes and signatures of both."""

    def __init__(self, num_tokens: int, dim: int, device: str) -> None:
        self.num_tokens, self.dim, self.device = num_tokens, dim, device
        self.references = torch.randn(num_tokens, dim, device=device)
        order = (torch.arange(num_tokens) + torch.randn(num_tokens) * WINDOW / 4).argsort()
        self.queries = self.references[order.to(device)]
        self.queries += 0.5 * torch.randn(num_tokens, dim, device=device)
        if faiss and device == "cpu":
            self.index = faiss.IndexLSH(dim, BITS, True, False)
            rotation = faiss.vector_to_array(self.index.rrot.A).reshape(BITS, dim)
            self.planes = torch.from_numpy(rotation).t()
        else:
            self.index = None
            self.planes = torch.randn(dim, BITS, device=device)
        self.query_sig = mk.simhash(self.queries, self.planes)
        self.reference_sig = mk.simhash(self.references, self.planes)


def torch_simhash(embeddings: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """Pack signs with torch."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=planes.device)
    signs = (embeddings @ planes >= 0).view(len(embeddings), -1, 8)
    return (signs * weights).sum(-1, dtype=torch.uint8)


def torch_match(query_sig: torch.Tensor, reference_sig: torch.Tensor, window: int | None) -> Pair:
    """Match by products of +-1: the product of two signatures is bits - 2 * distance."""
    shifts = torch.arange(8, dtype=torch.uint8, device=query_sig.device)
    queries, references = (
        ((side[:, :, None] >> shifts & 1).flatten(1).float() * 2 - 1)
        for side in (query_sig, reference_sig)
    )
    positions = torch.arange(max(len(queries), len(references)), device=query_sig.device)
    products, indices = [], []
    for first in range(0, len(queries), ROWS):
        rows = queries[first : first + ROWS]
        begin = 0 if window is None else max(first - window, 0)
        end = None if window is None else first + len(rows) + window
        dots = rows @ references[begin:end].t()
        if window is not None:
            own = positions[first : first + len(rows), None]
            offsets = own - positions[begin : begin + dots.shape[1]]
            dots.masked_fill_(offsets.abs() > window, -math.inf)
        largest = dots.max(dim=1)
        products.append(largest.values)
        indices.append(largest.indices + begin)
    return torch.cat(indices), ((BITS - torch.cat(products)) / 2).int()


def differing_bits(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Count them, token by token."""
    shifts = torch.arange(8, dtype=torch.uint8, device=ours.device)
    return ((ours ^ theirs)[:, :, None] >> shifts & 1).sum((1, 2))


def check_distances(tokens: Tokens, ours: Pair, theirs: torch.Tensor) -> None:
    """Compare distances; which of several equally near references is found may differ."""
    index, distance = ours
    assert torch.equal(distance, theirs.to(distance.dtype)), "wrong, not timed"
    assert torch.equal(differing_bits(tokens.query_sig, tokens.reference_sig[index]), distance)


def simhash_case(tokens: Tokens) -> Case:
    queries, planes = tokens.queries, tokens.planes
    baselines: dict[str, Callable[[], Any]] = {"torch": lambda: torch_simhash(queries, planes)}
    if tokens.index:
        baselines["faiss"] = lambda: torch.from_numpy(tokens.index.sa_encode(queries.numpy()))

    def check() -> None:
        for call in baselines.values():
            wrong = differing_bits(tokens.query_sig, call())
            assert wrong.sum() <= SHARE * BITS * len(wrong), "wrong, not timed"

    return Case(
        f"simhash {tokens.num_tokens} x {tokens.dim}",
        lambda: mk.simhash(queries, planes),
        baselines,
        check,
        num_flops=2.0 * tokens.num_tokens * tokens.dim * BITS,
    )


def match_case(tokens: Tokens, window: int | None) -> Case:
    sides = tokens.query_sig, tokens.reference_sig
    baselines: dict[str, Callable[[], Any]] = {"torch": lambda: torch_match(*sides, window)}
    if tokens.index and window is None:
        flat = faiss.IndexBinaryFlat(BITS)
        flat.add(tokens.reference_sig.numpy())
        baselines["faiss"] = lambda: flat.search(tokens.query_sig.numpy(), 1)

    def check() -> None:
        ours = mk.hamming_match(*sides, window=window)
        check_distances(tokens, ours, torch_match(*sides, window)[1])
        if "faiss" in baselines:
            check_distances(tokens, ours, torch.from_numpy(baselines["faiss"]()[0][:, 0]))

    return Case(
        f"match {tokens.num_tokens} x {tokens.num_tokens}, window {window}",
        lambda: mk.hamming_match(*sides, window=window),
        baselines,
        check,
    )


def lookup_case(tokens: Tokens) -> Case | LeftOut:
    title = f"lookup {tokens.num_tokens} x {tokens.num_tokens}, dim {tokens.dim}"
    if tokens.index is None:
        return LeftOut(
            title, "it is compared with faiss-cpu, which is not installed or not for this"
        )
    index = tokens.index
    index.add_sa_codes(tokens.reference_sig.numpy())

    def ours() -> Pair:
        sig = mk.simhash(tokens.queries, tokens.planes)
        return mk.hamming_match(sig, tokens.reference_sig)

    def theirs() -> torch.Tensor:
        return torch.from_numpy(index.search(tokens.queries.numpy(), 1)[0][:, 0])

    def check() -> None:
        codes = torch.from_numpy(index.sa_encode(tokens.queries.numpy()))
        wrong = differing_bits(tokens.query_sig, codes)
        assert wrong.sum() <= SHARE * BITS * len(wrong), "wrong, not timed"
        assert ((ours()[1] - theirs()).abs() <= wrong).all(), "wrong, not timed"

    return Case(title, ours, {"faiss": theirs}, check)


def cases(options: argparse.Namespace) -> Iterator[Case | LeftOut]:
    dims = QUICK_DIMS if options.quick else DIMS
    for num_tokens in QUICK_SIZES if options.quick else SIZES:
        for dim in dims:
            tokens = Tokens(num_tokens, dim, options.device)
            yield simhash_case(tokens)
            yield lookup_case(tokens)
            for window in (None, WINDOW) if dim == dims[0] else ():  # signatures have no dim
                yield match_case(tokens, window)


if __name__ == "__main__":
    options = arguments(__doc__)
    if faiss:
        faiss.omp_set_num_threads(options.threads)
    report("similarity", cases(options), options)
