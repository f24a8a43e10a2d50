"""The layers of docs/internals/design.md, checked against what the files import and include."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cc", ".cu", ".cuh"))
KERNELS = sorted((ROOT / "mooncake_kernels").rglob("*.py"))
SERVING = sorted((ROOT / "python/mooncake_serving").rglob("*.py"))
SIMULATOR = sorted((ROOT / "python/mooncake_simulator").rglob("*.py"))

OPS = {"common", "kv", "mask", "attention", "similarity"}
HOST = {"common", "hash", "topology", "rdma", "served", "store", "transfer"}
CSRC_MAY_USE = {
    "common": set(),
    **{family: {"common"} for family in OPS | HOST},
    "attention": {"common", "mask"},
    "transfer": {"common", "rdma", "topology"},
    "served": {"common", "store", "transfer"},
    "ops": OPS,
    "host": HOST,
}
# The folders of csrc/transfer, each of which includes only itself and those before it.
TRANSFER = "base memory wire net request gpu channel tcp local file shm rdma server peer engine"
TRANSFER_RANK = {folder: rank for rank, folder in enumerate(TRANSFER.split())}
# The parts of python/mooncake_serving/store, each of which imports only itself and those before it.
STORE = """
    keyspace checks ssd directory object_list eviction quotas watermark store tiered
    cluster metrics events replication admin cli
"""
STORE_RANK = {part: rank for rank, part in enumerate(STORE.split())}
KERNELS_ONLY = {"mooncake_kernels"}
BASE = {"mooncake_kernels", "arguments", "rpc"}
ALL_BELOW = BASE | {"chunking", "conductor", "dist_attention", "semantic", "store"}
SERVING_MAY_USE = {
    "arguments": KERNELS_ONLY,
    "rpc": KERNELS_ONLY,
    "conductor": set(),
    "chunking": KERNELS_ONLY,
    "semantic": {"mooncake_kernels", "arguments"},
    "store": {"mooncake_kernels", "rpc"},
    "dist_attention": BASE,
    "dist_attention/engine": BASE | {"dist_attention", "engine"},
    "http_api": KERNELS_ONLY,
    "router": {"mooncake_kernels", "conductor", "http_api", "store"},
    "serve": ALL_BELOW | {"connectors", "engine", "http_api", "router"},
    "serve/bench": ALL_BELOW | {"router", "serve"},
    "engine": ALL_BELOW - {"dist_attention"},
    "connectors": ALL_BELOW,
    "compat": ALL_BELOW,
}
EVERYTHING = {"mooncake_kernels", "demo", *SERVING_MAY_USE}
SERVING_MAY_USE |= {"__main__": EVERYTHING, "demo": EVERYTHING}
ABOVE_KERNELS = {"mooncake_serving", "mooncake_simulator"}
FAMILIES = {"kv", "mask", "attention", "similarity", "hashing"}
FAMILIES |= {"topology", "rdma", "metadata", "pool", "transfer"}
FAMILY_MAY_USE = {"attention": {"mask"}, "transfer": {"topology", "metadata", "pool"}}
CONDUCTOR_MAY_USE = {"numpy"}  # and the standard library


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def includes(path: Path) -> list[str]:
    return re.findall(r'#\s*include\s+["<]([^">]+)[">]', path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Absolute dotted names, relative imports resolved."""
    base = list(
        path.relative_to(ROOT / "python" if path in SERVING + SIMULATOR else ROOT).parent.parts
    )
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = base[: len(base) - node.level + 1] if node.level else []
            module = [*package, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*module, alias.name]) for alias in node.names)


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_csrc_includes_only_downward(path):
    family = path.relative_to(ROOT / "csrc").parts[0]
    for include in includes(path):
        folder = include.split("/")[0]
        if folder in CSRC_MAY_USE and "/" in include:
            assert folder == family or folder in CSRC_MAY_USE[family], f"must not include {include}"


@pytest.mark.parametrize("path", [p for p in CSRC if "transfer" in p.parts], ids=name)
def test_transfer_includes_only_folders_before_its_own(path):
    _, folder, _ = path.relative_to(ROOT / "csrc").parts
    for include in includes(path):
        if include.startswith("transfer/"):
            other = include.split("/")[1]
            assert TRANSFER_RANK[other] <= TRANSFER_RANK[folder], f"must not include {include}"


STORE_FOLDER = ROOT / "python/mooncake_serving/store"
STORE_FILES = [p for p in SERVING if STORE_FOLDER in p.parents]


def store_part(module: str) -> str:
    """The part of the store that a module is in; "" of none, and for the package itself."""
    found = re.match(r"mooncake_serving\.store\.(\w+)", module)
    return found[1] if found and found[1] in STORE_RANK else ""


@pytest.mark.parametrize("path", STORE_FILES, ids=name)
def test_the_store_imports_only_parts_before_its_own(path):
    part = path.relative_to(STORE_FOLDER).with_suffix("").parts[0]
    if part in ("__init__", "__main__"):
        return
    for module in imports(path):
        if other := store_part(module):
            assert STORE_RANK[other] <= STORE_RANK[part], f"must not import {module}"


@pytest.mark.parametrize("path", [p for p in SERVING if p not in STORE_FILES], ids=name)
def test_others_import_what_packages_of_the_store_export(path):
    for module in imports(path):
        if found := re.match(r"mooncake_serving\.store\.(.+)\.\w+$", module):
            folder = STORE_FOLDER / found[1].replace(".", "/")
            assert folder.is_dir(), f"must not import from a file of the store: {module}"


def test_a_transport_needs_few_functions():
    """Those without a default; what is for one transport, or for speed, has an interface apart."""
    header = (ROOT / "csrc/transfer/channel/channel.h").read_text()
    assert len(re.findall(r"\) (?:const |noexcept )?= 0;", header)) <= 8


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_torch_is_included_only_by_ops_and_python_only_by_host(path):
    family = path.relative_to(ROOT / "csrc").parts[0]
    for include in includes(path):
        assert family == "ops" or not include.startswith("torch/"), include
        assert family == "host" or not include.startswith(("pybind11/", "Python.h")), include


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_csrc_prints_nothing_and_reads_no_environment(path):
    assert not re.search(r"\b(printf|getenv|std::cout|std::cerr)\b", path.read_text())


@pytest.mark.parametrize("path", KERNELS, ids=name)
def test_kernels_do_not_import_serving(path):
    assert not {i.split(".")[0] for i in imports(path)} & {*ABOVE_KERNELS, "mooncake"}


def family_of(path: Path) -> str:
    """Its module or package, with what reference/ and triton/ have of it; "" of no family."""
    parts = path.relative_to(ROOT / "mooncake_kernels").with_suffix("").parts
    family = (parts[1] if parts[0] in ("reference", "triton") else parts[0]).split("_")[0]
    return family if family in FAMILIES else ""


@pytest.mark.parametrize("path", [p for p in KERNELS if family_of(p)], ids=name)
def test_families_do_not_import_each_other(path):
    family = family_of(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "mooncake_kernels" and len(parts) > 1 and parts[1] in FAMILIES:
            allowed = {family} | FAMILY_MAY_USE.get(family, set())
            assert parts[1] in allowed, f"must not import {module}"


DOCTOR = ROOT / "mooncake_kernels/doctor"


@pytest.mark.parametrize("path", [p for p in KERNELS if DOCTOR not in p.parents], ids=name)
def test_only_the_command_imports_the_doctor(path):
    known = [module for module in imports(path) if module.startswith("mooncake_kernels.doctor")]
    assert not known or path.name == "__main__.py"


@pytest.mark.parametrize("path", SERVING, ids=name)
def test_serving_imports_only_downward(path):
    parts = path.relative_to(ROOT / "python/mooncake_serving").with_suffix("").parts
    folder = "/".join(parts[:2]) if "/".join(parts[:2]) in SERVING_MAY_USE else parts[0]
    if folder == "__init__":
        return
    for module in imports(path):
        top, _, rest = module.partition(".")
        other = rest.split(".")[0] if top == "mooncake_serving" else top
        if other in SERVING_MAY_USE or other == "mooncake_kernels":
            assert other == folder or other in SERVING_MAY_USE[folder], f"must not import {module}"
        assert not re.match(r"mooncake_kernels\._", module), f"{module} is not public"
        assert top != "mooncake_simulator" or folder == "serve/bench", f"must not import {module}"


@pytest.mark.parametrize("path", SIMULATOR, ids=name)
def test_the_simulator_uses_the_conductor_alone(path):
    for module in imports(path):
        top, _, rest = module.partition(".")
        assert top != "mooncake_kernels", f"must not import {module}"
        assert top != "mooncake_serving" or rest.split(".")[0] == "conductor", module


@pytest.mark.parametrize("path", [p for p in SERVING if "conductor" in p.parts], ids=name)
def test_the_conductor_needs_only_numpy(path):
    import sys

    for module in imports(path):
        top = module.split(".")[0]
        assert top in sys.stdlib_module_names | CONDUCTOR_MAY_USE | {"mooncake_serving"}, module


@pytest.mark.parametrize(
    "row, exceptions",
    [
        ("a family", FAMILY_MAY_USE),
        ("`csrc/<family>`", {f: CSRC_MAY_USE[f] - {"common"} for f in OPS | HOST}),
    ],
)
def test_design_page_lists_the_same_exceptions(row, exceptions):
    [cells] = re.findall(
        rf"^\| {row}.*?\|(.*)\|$", (ROOT / "docs/internals/design.md").read_text(), re.MULTILINE
    )
    told = {
        part.split("`")[1]: set(part.split("`")[3::2])
        for part in cells.split(";")
        if " also " in part
    }
    assert told == {family: uses for family, uses in exceptions.items() if uses}
