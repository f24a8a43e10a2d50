"""Draws architecture.svg: the layers of the project. Run it after a layer has changed."""

from html import escape
from pathlib import Path

WIDTH, MARGIN, GAP, TITLE, BOX, ROW = 960, 24, 12, 30, 58, 14
SANS = "font-family='Helvetica, Arial, sans-serif'"
# The title, the folder, the color, and the boxes: what of the folder, what it is, a share of the
# width. The machine has no folder.
LAYERS = [
    ("mooncake_simulator: a program of its own", None, "#e2efdc", [
        ("mooncake_simulator", "traces replayed on a simulated cluster; the papers' figures", 1),
    ]),
    ("mooncake_serving: what runs", "python/mooncake_serving", "#e8f0e4", [
        ("serve", "an engine's server; a cluster by one command", 1),
        ("router, http_api", "the conductor in front of engines", 1),
        ("engine", "a real model; prefill and decode apart", 1),
        ("connectors", "vLLM: the store behind its prefix cache", 1),
        ("compat", "Mooncake's Python API for transfers and store", 1),
        ("demo", "all of it on one screen", 0.7),
    ]),
    ("mooncake_serving: what decides", "python/mooncake_serving", "#eef4e6", [
        ("conductor", "where a request goes: plain data in, a decision out", 1),
        ("chunking", "what goes into a step", 0.7),
        ("dist_attention", "instances lend each other cache blocks", 1.05),
        ("semantic", "what to reuse of a similar prompt", 0.9),
        ("store", "objects kept over DRAM and SSD, found by every node", 1),
    ]),
    ("mooncake_serving: requests between processes", "python/mooncake_serving", "#f2f7ea", [
        ("rpc", "requests to other processes and answers, over the transfer engine", 1),
    ]),
    ("mooncake_kernels: the Python API, a family each", "mooncake_kernels", "#e3ecf6", [
        ("kv", "views, copy plans, gather, scatter", 0.9),
        ("mask, attention", "who attends to whom; paged, merged", 1),
        ("hashing, similarity", "names of blocks; SimHash", 1),
        ("transfer, metadata, pool", "between engines; how they are found; objects", 1.2),
        ("rdma, topology", "registration; NIC choice", 0.9),
        ("doctor, http_server", "what is wrong; callers", 0.95),
    ]),
    ("csrc: C++17 and CUDA", "csrc", "#f6ece0", [
        ("kv, mask, attention, similarity", "_ops.so: torch operators on the stable ABI", 1),
        ("hash, topology, rdma, store, served, transfer", "_host: pybind11, no torch", 1.2),
        ("common", "errors, threads, dlopen tables: in both", 0.8),
    ]),
    ("the machine", None, "#eeeeee", [
        ("torch", "CPU or CUDA, 2.11 and later", 1),
        ("CUDA driver, libibverbs, libcufile", "opened when first needed", 1),
        ("sockets, shared memory, files", "Linux", 1),
    ]),
]  # fmt: skip


def text(x: float, y: float, content: str, size: int, weight: str = "normal") -> str:
    style = f"{SANS} font-size='{size}' font-weight='{weight}'"
    return f"<text x='{x}' y='{y}' {style}>{escape(content)}</text>"


def wrapped(content: str, width: int) -> list[str]:
    lines = [""]
    for word in content.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def box(x: float, y: float, width: float, name: str, about: str) -> list[str]:
    parts = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{BOX}' rx='4' fill='white' stroke='#444'/>",
        text(x + 8, y + 18, name, 13, "bold"),
    ]
    for i, line in enumerate(wrapped(about, int(width / 6.2))):
        parts.append(text(x + 8, y + 35 + ROW * i, line, 11))
    return parts


def draw() -> str:
    parts, y = [], MARGIN
    for title, _, color, boxes in LAYERS:
        height = TITLE + BOX + 3 * GAP
        parts.append(
            f"<rect x='{MARGIN}' y='{y}' width='{WIDTH - 2 * MARGIN}' height='{height}' rx='6' "
            f"fill='{color}'/>"
        )
        parts.append(text(MARGIN + GAP, y + 24, title, 14, "bold"))
        room = WIDTH - 2 * MARGIN - GAP * (len(boxes) + 1)
        shares = sum(share for _, _, share in boxes)
        x = MARGIN + GAP
        for name, about, share in boxes:
            width = room * share / shares
            parts += box(round(x, 1), y + TITLE + GAP, round(width, 1), name, about)
            x += width + GAP
        y += height + GAP
    parts.append(text(MARGIN, y + 10, "Each layer uses only those below it.", 12))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y + MARGIN}' "
        f"viewBox='0 0 {WIDTH} {y + MARGIN}'>\n<rect width='100%' height='100%' fill='white'/>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
