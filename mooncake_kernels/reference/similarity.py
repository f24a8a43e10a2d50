"""The specification of signatures and their matching: loops on Python's integers."""

import torch


def simhash(embeddings: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """Return the signatures; dots are summed in float64."""
    num_bytes = planes.shape[1] // 8
    signatures = torch.zeros(len(embeddings), num_bytes, dtype=torch.uint8, device="cpu")
    for token, dots in enumerate((embeddings.double() @ planes.double()).tolist()):
        for bit, dot in enumerate(dots):
            if dot >= 0:
                signatures[token, bit // 8] |= 1 << bit % 8
    return signatures.to(embeddings.device)


def hamming_match(
    query_sig: torch.Tensor,
    reference_sig: torch.Tensor,
    max_distance: int | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index and the distance of each query's match, or -1 and -1."""
    queries, references = (
        [int.from_bytes(bytes(row), "little") for row in signatures.tolist()]
        for signatures in (query_sig, reference_sig)
    )
    index = torch.full((len(queries),), -1, dtype=torch.int64, device="cpu")
    distance = torch.full((len(queries),), -1, dtype=torch.int32, device="cpu")
    for i, query in enumerate(queries):
        pairs = (
            ((query ^ reference).bit_count(), abs(i - j), j)
            for j, reference in enumerate(references)
            if window is None or abs(i - j) <= window
        )
        best = min(pairs, default=None)
        if best is not None and (max_distance is None or best[0] <= max_distance):
            distance[i], index[i] = best[0], best[2]
    return index.to(query_sig.device), distance.to(query_sig.device)
