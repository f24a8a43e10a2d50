"""Draws speed.svg: transfers compared with Mooncake's engine and NIXL, from bench/results."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/transfer.jsonl"
# What is moved, the case of the results, and the columns of the baselines.
GROUPS = [
    ("tcp, write", "tcp write, 4096 x 16 KiB", ["mooncake", "nixl-tcp"]),
    ("tcp, read", "tcp read, 4096 x 16 KiB", ["mooncake", "nixl-tcp"]),
    ("shared memory, write", "shm write, 4096 x 16 KiB", ["nixl-cma"]),
    ("shared memory, read", "shm read, 4096 x 16 KiB", ["nixl-cma"]),
]
NAMES = {"mooncake": "Mooncake", "nixl-tcp": "NIXL (UCX, tcp)", "nixl-cma": "NIXL (UCX, cma)"}
WIDTH, LEFT, BAR, GAP, SCALE = 760, 300, 18, 14, 25.0  # SCALE: pixels a GB/s
OURS, THEIRS = "#3f51b5", "#b0b7c3"
STYLE = "font-family='Helvetica, Arial, sans-serif' font-size='13'"


def bars() -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Of each group the bars: whose, GB/s, the color."""
    rows = {row["case"]: row for row in map(json.loads, RESULTS.read_text().splitlines()[1:])}
    return [
        (
            title,
            [("mooncake-kernels", rows[case]["gb_per_s"], OURS)]
            + [(NAMES[name], rows[case][f"gb_per_s_{name}"], THEIRS) for name in baselines],
        )
        for title, case, baselines in GROUPS
    ]


def draw() -> str:
    parts, y = [], 34
    title = "4,096 scattered blocks of 16 KiB between two processes of one machine, GB/s"
    parts.append(f"<text x='12' y='20' {STYLE} font-weight='bold'>{title}</text>")
    for group, lines in bars():
        parts.append(f"<text x='12' y='{y + 13}' {STYLE}>{group}</text>")
        for name, speed, color in lines:
            width = round(speed * SCALE, 1)
            parts += [
                f"<text x='{LEFT - 8}' y='{y + 13}' {STYLE} text-anchor='end'>{name}</text>",
                f"<rect x='{LEFT}' y='{y}' width='{width}' height='{BAR - 3}' fill='{color}'/>",
                f"<text x='{LEFT + width + 6:.1f}' y='{y + 13}' {STYLE}>{speed:.1f}</text>",
            ]
            y += BAR
        y += GAP
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y}' "
        f"viewBox='0 0 {WIDTH} {y}'>\n<rect width='100%' height='100%' fill='white'/>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
