"""Draws docs/architecture.svg: the layers of the project. Run it after a layer has changed."""

from html import escape
from pathlib import Path

WIDTH, MARGIN, GAP, TITLE, BOX, ROW = 960, 24, 12, 30, 58, 14
SANS = "font-family='Helvetica, Arial, sans-serif'"
LAYERS = [
    ("mooncake_serving: what decides", "#e8f0e4", [
        ("engine", "a real model; prefill and decode apart", True),
        ("conductor", "where a request goes", False),
        ("store", "blocks kept over DRAM and SSD", False),
        ("pooling, semantic", "DistAttention, SemShareKV", False),
        ("simulator, connectors", "traces; vLLM", False),
    ]),
    ("mooncake_kernels: the Python API, one module a family", "#e3ecf6", [
        ("kv", "views, copy plans, gather, scatter", True),
        ("hashing", "names of blocks", True),
        ("transfer", "writes and reads between engines", True),
        ("mask, attention", "chunked prefill", False),
        ("rdma, topology", "NICs, registration, NIC choice", True),
    ]),
    ("csrc: C++17 and CUDA", "#f6ece0", [
        ("_ops.so", "torch operators on the stable ABI: kv", True),
        ("_host", "pybind11, no torch: hash, topology, rdma, transfer", True),
        ("common", "errors, dlopen tables", True),
    ]),
    ("the machine", "#eeeeee", [
        ("torch", "CPU or CUDA, 2.11 and later", True),
        ("CUDA driver, libibverbs", "opened when first needed", True),
        ("sockets", "tcp", True),
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


def box(x: float, y: float, width: float, name: str, about: str, built: bool) -> list[str]:
    dash = "" if built else " stroke-dasharray='5 4'"
    parts = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{BOX}' rx='4' fill='white' "
        f"stroke='#444'{dash}/>",
        text(x + 8, y + 18, name, 13, "bold"),
    ]
    for i, line in enumerate(wrapped(about, int(width / 6.2))):
        parts.append(text(x + 8, y + 35 + ROW * i, line, 11))
    return parts


def draw() -> str:
    parts, y = [], MARGIN
    for title, color, boxes in LAYERS:
        height = TITLE + BOX + 3 * GAP
        parts.append(
            f"<rect x='{MARGIN}' y='{y}' width='{WIDTH - 2 * MARGIN}' height='{height}' rx='6' "
            f"fill='{color}'/>"
        )
        parts.append(text(MARGIN + GAP, y + 24, title, 14, "bold"))
        width = (WIDTH - 2 * MARGIN - GAP) / len(boxes) - GAP
        for i, (name, about, built) in enumerate(boxes):
            x = MARGIN + GAP + i * (width + GAP)
            parts += box(round(x, 1), y + TITLE + GAP, round(width, 1), name, about, built)
        y += height + GAP
    parts.append(
        text(MARGIN, y + 10, "Each layer uses only those below it. Dashed: not built yet.", 12)
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y + MARGIN}' "
        f"viewBox='0 0 {WIDTH} {y + MARGIN}'>\n<rect width='100%' height='100%' fill='white'/>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
