"""Draw each rule: which pairs it sees, and its tiles by class; one PNG a rule, for masks.md.

A dark square is a visible pair. A tile of 8 x 8 is blue where it is full, orange where it is
partial, white where it is empty. The same sources give the same pictures.

    python docs/kernels/mask_pictures.py docs/kernels/masks
"""

import sys
from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import mooncake_kernels as mk

Q_LEN, KV_LEN, TILE = 32, 48, 8
COLORS = {"empty": "#ffffff", "partial": "#f6c88f", "full": "#9cc3e6"}
CAUSAL = mk.mask.causal()
DRAFTS = [-1, 0, 0, 1, 1, 2, 2, 3, 4, 4]
RULES = {
    "causal": CAUSAL,
    "full": mk.mask.full(),
    "sliding_window": CAUSAL & mk.mask.sliding_window(12),
    "sliding_window_and_sink": (CAUSAL & mk.mask.sliding_window(12)) | mk.mask.sink(4),
    "chunked_local": CAUSAL & mk.mask.chunked_local(16),
    "prefix_lm": mk.mask.prefix_lm(28),
    "documents": CAUSAL & mk.mask.documents([0, 20, 31, 40]),
    "spans": CAUSAL | mk.mask.spans([(4, 10), (22, 34)]),
    "items": mk.mask.items(20, [20, 28, 38]),
    "tree": mk.mask.tree(DRAFTS),
}


def tile_classes(block_map: mk.mask.BlockMap) -> torch.Tensor:
    """Return 0, 1 or 2 a tile: empty, partial, full."""
    classes = torch.zeros(block_map.num_q_blocks, -(-KV_LEN // TILE), dtype=torch.int64)
    for value, kind in enumerate(("partial", "full"), start=1):
        lists = block_map.indices(kind).tolist()
        for block, count in enumerate(block_map.count(kind).tolist()):
            classes[block, lists[block][:count]] = value
    return classes


def draw(axes: Axes, rule: mk.mask.Rule) -> None:
    """Draw one rule for the last queries of a request."""
    rows = mk.mask.rows(rule, mk.ChunkBatch([Q_LEN], [KV_LEN]))
    classes = tile_classes(rows.block_map(TILE, TILE))
    extent = (0, KV_LEN, Q_LEN, 0)
    palette = ListedColormap([*COLORS.values()])
    axes.imshow(classes, cmap=palette, vmin=0, vmax=2, extent=extent, interpolation="none")
    for query, key in rows.dense()[0].nonzero().tolist():
        axes.add_patch(plt.Rectangle((key + 0.2, query + 0.2), 0.6, 0.6, color="#26435e", lw=0))
    axes.set_xticks(range(0, KV_LEN + 1, TILE))
    axes.set_yticks(range(0, Q_LEN + 1, TILE), range(KV_LEN - Q_LEN, KV_LEN + 1, TILE))
    axes.grid(color="#888888", linewidth=0.6)
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("key", fontsize=8)
    axes.set_ylabel("position of the query", fontsize=8)
    axes.set_title(str(rule), fontsize=9, loc="left")


def main(folder: Path) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rule in RULES.items():
        figure, axes = plt.subplots(figsize=(5.2, 3.9), dpi=90, layout="constrained")
        draw(axes, rule)
        legend = [Patch(facecolor=c, edgecolor="#888888", label=n) for n, c in COLORS.items()]
        figure.legend(handles=legend, loc="outside lower right", ncols=3, fontsize=7, frameon=False)
        figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        plt.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
