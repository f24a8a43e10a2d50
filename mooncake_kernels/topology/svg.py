"""A machine as a picture, in self-contained SVG."""

from xml.sax.saxutils import escape

from .layout import CHAR, GAP, LINE, LINK, PAD, Box, Socket, sockets_of
from .model import System

_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_FILL = {"switch": "#e8e6f7", "gpu": "#dff0d8", "nic": "#dcebf9", "down": "#f7dedc"}
_STROKE = {"switch": "#6f63b6", "gpu": "#4f8a3c", "nic": "#3b78b0", "down": "#b5493f"}
_INK, _QUIET, _PANEL, _LINE = "#1f2430", "#5b6472", "#f6f7f9", "#8a93a1"
_LEGEND = (("gpu", "GPU, and → its first NIC"), ("nic", "NIC"), ("down", "NIC, port down"))


def draw(system: System, first_nic: dict[str, str]) -> str:
    """Return the picture: a panel per NUMA node, with its trees of switches, GPUs and NICs."""
    sockets = sockets_of(system, first_nic)
    title = f"{len(system.numa)} NUMA nodes, {len(system.gpus)} GPUs, {len(system.nics)} NICs"
    legend_width = sum(CHAR * len(text) + 4 * PAD for _, text in _LEGEND) + CHAR * len(title) + GAP
    right = max([socket.x + socket.width for socket in sockets] + [legend_width + GAP])
    width = right + GAP
    height = sockets[-1].y + sockets[-1].height + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="{_FONT}" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        *_legend(title),
    ]
    for socket in sockets:
        parts += _socket(socket, right - GAP)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(title: str) -> list[str]:
    parts = [_text(GAP, GAP + LINE, title, _INK, "start", bold=True)]
    x = GAP + CHAR * len(title) + 2 * PAD
    for kind, text in _LEGEND:
        parts.append(_rect(x, GAP + 5, LINE, LINE - 3, _FILL[kind], _STROKE[kind], 3))
        parts.append(_text(x + LINE + 6, GAP + LINE, text, _QUIET, "start"))
        x += CHAR * len(text) + 4 * PAD
    return parts


def _socket(socket: Socket, width: float) -> list[str]:
    parts = [
        _rect(socket.x, socket.y, width, socket.height, _PANEL, "#d5d9e0", 10),
        _text(socket.x + GAP, socket.y + PAD + LINE, socket.title, _INK, "start", bold=True),
    ]
    parts += _trunk(socket)
    for tree in socket.trees:
        parts.append(_wire(tree, tree.y - LINK + 4))
        parts += _tree(tree)
    return parts


def _trunk(socket: Socket) -> list[str]:
    """Return the lines that join the trees of a socket: one above each row, one down its side."""
    side, tops = socket.x + GAP / 2, sorted({tree.y - LINK + 4 for tree in socket.trees})
    parts = []
    for top in tops:
        last = max(_wire_x(tree) for tree in socket.trees if tree.y - LINK + 4 == top)
        parts.append(_path(f"M{side:.1f} {top:.1f}H{last:.1f}"))
    if tops:
        parts.append(_path(f"M{side:.1f} {socket.y + PAD + LINE:.1f}V{tops[-1]:.1f}"))
    return parts


def _tree(box: Box) -> list[str]:
    parts = [_rect(box.x, box.y, box.width, box.height, _FILL[box.kind], _STROKE[box.kind], 5)]
    middle = box.x + box.width / 2
    for i, line in enumerate(box.lines):
        ink = _INK if i == 0 else _QUIET
        y = box.y + PAD + LINE * (i + 1) - 4
        parts.append(_text(middle, y, line, ink, "middle", bold=i == 0))
    for inner in box.below:
        parts.append(_wire(inner, box.y + box.height))
        parts += _tree(inner)
    return parts


def _wire(box: Box, top: float) -> str:
    """Return the line from a box up to the one above, with its label."""
    x = _wire_x(box)
    label = _text(x + 6, box.y - 9, box.link, _QUIET, "start") if box.link else ""
    return _path(f"M{x:.1f} {top:.1f}V{box.y:.1f}") + label


def _wire_x(box: Box) -> float:
    return box.x + min(box.width / 2, CHAR * 4)


def _path(steps: str) -> str:
    return f'<path d="{steps}" fill="none" stroke="{_LINE}" stroke-width="1.5"/>'


def _rect(
    x: float, y: float, width: float, height: float, fill: str, stroke: str, radius: int
) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius}" fill="{fill}" stroke="{stroke}"/>'
    )


def _text(x: float, y: float, text: str, fill: str, anchor: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    legal = "".join(c if c >= " " and c.isprintable() else "?" for c in text)  # legal in XML
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(legal)}</text>"
    )
