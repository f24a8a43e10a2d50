"""The picture of the layers is what its script draws, of what is there; its texts fit."""

import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = runpy.run_path(str(ROOT / "docs/internals/architecture.py"))
LAYERS = SCRIPT["LAYERS"]
PART_OF_EACH_FAMILY = {"reference", "triton"}
BINDINGS = {"ops", "host"}  # _ops.so and _host in the picture


def drawn(folder: str) -> set[str]:
    boxes = [box for _, of, _, boxes in LAYERS if of == folder for box in boxes]
    return {name for names, _, _ in boxes for name in names.split(", ")}


def folders(parent: Path) -> set[str]:
    """Those with sources: a checkout may have others' leftovers."""
    return {
        path.name for path in parent.iterdir() if any(path.glob("*.py")) or any(path.glob("*.h"))
    }


def test_picture_matches_its_script():
    assert (ROOT / "docs/internals/architecture.svg").read_text() == SCRIPT["draw"]()


@pytest.mark.parametrize("folder", sorted({of for _, of, _, _ in LAYERS if of}))
def test_each_box_exists_in_the_tree(folder):
    for name in drawn(folder):
        assert (ROOT / folder / name).is_dir() or (ROOT / folder / f"{name}.py").is_file(), name


@pytest.mark.parametrize("folder", sorted({of for _, of, _, _ in LAYERS if of}))
def test_each_folder_has_a_box(folder):
    assert folders(ROOT / folder) - PART_OF_EACH_FAMILY - BINDINGS <= drawn(folder)


def advances(font: str) -> dict[str, int]:
    """How wide each character is, in thousandths of the font's size."""
    matplotlib = pytest.importorskip("matplotlib")
    metrics = Path(matplotlib.get_data_path(), "fonts/afm", font).read_text(encoding="latin-1")
    codes = re.findall(r"^C (\d+) ; WX (\d+) ;", metrics, re.MULTILINE)
    return {chr(int(code)): int(width) for code, width in codes}


def test_every_text_is_inside_its_box():
    fonts = {"bold": advances("phvb8a.afm"), "normal": advances("phvr8a.afm")}  # Helvetica
    picture = ElementTree.fromstring(SCRIPT["draw"]())
    rectangles = [
        [float(shape.get(side)) for side in ("x", "y", "width", "height")]
        for shape in picture.iter("{http://www.w3.org/2000/svg}rect")
        if shape.get("x")
    ]
    *texts, _ = picture.iter("{http://www.w3.org/2000/svg}text")  # the last is below all boxes
    for text in texts:
        x, y, size = (float(text.get(name)) for name in ("x", "y", "font-size"))
        wide = sum(fonts[text.get("font-weight")][c] for c in text.text) * size / 1000
        around = [r for r in rectangles if r[0] <= x < r[0] + r[2] and r[1] <= y < r[1] + r[3]]
        left, top, width, height = min(around, key=lambda r: r[2])
        assert x + wide + 4 <= left + width, text.text
        assert y + 4 <= top + height, text.text
