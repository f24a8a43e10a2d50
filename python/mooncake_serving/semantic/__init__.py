"""What a prompt can reuse of a similar one's KV, after SemShareKV (docs/serving/semantic.md).

from mooncake_serving.semantic import Recompute, SignatureIndex, Signer, rows_by_layer

signer, index = Signer(dim=576), SignatureIndex(bits=256)
index.add(7, signer.sign(embeddings_of_a_kept_prompt))
match = index.find(signer.sign(embeddings))           # which prompt, how similar, and the token map
rows = rows_by_layer(deviation, match.index >= 0, num_layers, Recompute(share=0.4))
"""

from .index import Match, SignatureIndex
from .recompute import DEFAULT, Recompute, deviations, rows_by_layer
from .signatures import Order, Signatures, Signer, with_context, with_positions

__all__ = [
    "DEFAULT",
    "Match",
    "Order",
    "Recompute",
    "SignatureIndex",
    "Signatures",
    "Signer",
    "deviations",
    "rows_by_layer",
    "with_context",
    "with_positions",
]
