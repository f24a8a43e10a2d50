"""The code of the pages without a test of their own runs as it is written, but for sizes, files and
addresses. Every block of every page runs in some test, or says what it needs; links lead somewhere.
"""

import getpass
import grp
import os
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_serving.store import SsdTier, Store
from mooncake_serving.store.directory import EmbeddedDirectory, Member

from .metadata.support import HttpServer
from .pages import ROOT, blocks_of, needs_of, run_block
from .store.cluster.conftest import hosts

__all__ = ["hosts"]

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))
FRONT = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
# How many blocks cannot run here, by what they need.
NOT_RUN = {"a GPU": 4, "an RDMA NIC": 2}
FOLDERS = ("tests/", "bench/", "csrc/", "python/", "docs/", "examples/", "mooncake_kernels/")
UNIT = 1024
TOKENS = np.arange(4 * 256)


def run(page: str, index: int, names: dict, **replaced: str) -> dict:
    """Run a block; each name of `replaced` stands for the page's text of that name in PLACES."""
    return run_block(page, index, names, {PLACES[name]: by for name, by in replaced.items()})


PLACES = {
    "pool": '"/dev/shm/kv"',
    "pool_bytes": "64 << 30",
    "file": "/mnt/ssd/pool",
    "memory_bytes": "1 << 30",
    "ssd": "/mnt/ssd/kv",
    "ssd_bytes": "1 << 40",
    "redis": "redis://10.0.0.1:6379/0",
    "address": "10.0.0.7:0",
    "create": "Store.create(",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_every_page_compiles(page):
    for block in blocks_of(page):
        compile(block, f"docs/{page}.md", "exec")


def test_every_block_runs_or_says_what_it_needs():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    ran = set(re.findall(r"""\brun(?:_block)?\(\s*"([\w/]+)", (\d+)""", tests))
    whole = set(re.findall(r"""\b(?:run_page|blocks_of)\(\s*"([\w/]+)\"""", tests))
    for page in PAGES:
        needs = needs_of(page)
        for index in range(len(blocks_of(page))):
            runs = page in whole or (page, str(index)) in ran
            assert runs != (index in needs), f"docs/{page}.md: block {index}"
    assert Counter(need for page in PAGES for need in needs_of(page).values()) == NOT_RUN


def anchors_of(text: str) -> set[str]:
    """As GitHub and MkDocs make them of headings."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*FRONT, *(f"docs/{page}.md" for page in PAGES)])
def test_its_links_lead_somewhere(path):
    page = ROOT / path
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file.read_text()), target


@pytest.mark.parametrize("path", [*FRONT, *(f"docs/{page}.md" for page in PAGES)])
def test_the_files_it_names_are_there(path):
    text = (ROOT / path).read_text()
    names = {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in quoted.split()}
    programs = {file.name for folder in ("tests", "bench") for file in (ROOT / folder).rglob("*.*")}
    for name in sorted(names):
        if name.startswith(FOLDERS) and re.fullmatch(r"[\w./-]+[\w/]", name):
            assert (ROOT / name).exists(), name
        elif re.fullmatch(r"(test|bench)_\w+\.(py|cc)", name):
            assert name in programs, name


def test_attention_page_runs():
    names = run("kernels/attention", 0, {})
    assert names["out"].shape == (21, 32, 128) and torch.isfinite(names["lse"]).all()


def test_copies():
    names = run("kernels/copies", 0, {})
    assert len(names["sums"]) == 2
    assert run("kernels/copies", 1, names)["header"]["state"].first_block == 1
    assert len(run("kernels/copies", 2, names)["four_bit"]["full"].views) == 2
    assert run("kernels/copies", 3, names)["header"]["full"].token_shard == (3, 4, 1)


def test_chunking_page_runs():
    names: dict = {}
    run("serving/chunking", 0, names)
    run("serving/chunking", 1, names)
    run("serving/chunking", 2, names)


def test_mask_formats_page_runs():
    names: dict = {}
    run("kernels/mask_formats", 0, names)
    run("kernels/mask_formats", 1, names)


def test_masks_page_runs():
    names = run("kernels/masks", 0, {})
    assert names["rows"].intervals.shape == (514, 4) and len(names["indptr"]) == 4


@pytest.mark.parametrize("window", [None, 128])
def test_sink_logits_on_the_masks_page_match_float64(window):
    """Against a softmax in float64 with one more term; a token in their place is far off."""
    attend = run("kernels/masks", 1, {"mk": mk, "torch": torch})["attend_with_sinks"]
    heads, kv_heads, dim, block_size, q_lens, kv_lens = 8, 2, 64, 16, [1, 5], [300, 140]
    generator = torch.Generator().manual_seed(1)
    batch, num_blocks = mk.ChunkBatch(q_lens, kv_lens), 19
    q = torch.randn(batch.num_q, heads, dim, generator=generator)
    k, v = torch.randn(2, 2 * num_blocks, block_size, kv_heads, dim, generator=generator)
    table = torch.arange(2 * num_blocks, dtype=torch.int32).view(2, num_blocks)
    sinks = torch.randn(heads, generator=generator) * 3
    rule = mk.mask.causal() & mk.mask.sliding_window(window) if window else mk.mask.causal()
    rows = mk.mask.rows(rule, batch)
    out, lse = attend(q, k, v, table, rows, sinks)
    wrong, _ = mk.paged_attention(q, k, v, table, mk.mask.rows(rule | mk.mask.sink(1), batch))

    expected, expected_lse = torch.zeros_like(q).double(), torch.zeros_like(lse).double()
    masks, group = rows.dense(), heads // kv_heads
    starts = [0, *np.cumsum(q_lens).tolist()]
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        keys, values = (cache[table[request].long()].double().flatten(0, 1) for cache in (k, v))
        for i in range(q_len):
            seen, row = masks[request][i].nonzero().flatten(), starts[request] + i
            assert len(seen) <= kv_len
            for head in range(heads):
                logits = keys[seen, head // group] @ q[row, head].double() / dim**0.5
                logits = torch.cat([logits, sinks[head : head + 1].double()])
                weights = torch.softmax(logits, 0)[:-1]
                expected[row, head] = weights @ values[seen, head // group]
                expected_lse[row, head] = torch.logsumexp(logits, 0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    assert (wrong.double() - expected).abs().max() > 0.01


def test_files_page_runs(tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(b"\0" * (2 << 20))
    run("transfer/files", 0, {}, file=str(path), memory_bytes="2 << 20")


def test_metadata_page_runs(capsys):
    server = HttpServer()
    try:
        names = run("transfer/metadata", 0, {}, redis=server.url)
        with names["engine"]:
            run("transfer/metadata", 1, names, redis=server.url)
    finally:
        server.stop()
    assert capsys.readouterr().out.startswith("prefill-3 ")


def test_topology_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    machines = ROOT / "tests/machines"
    shutil.copy(machines / "dump-two-switches.nccl.xml", "topo.xml")
    shutil.copy(machines / "dgx-h100.json", "topo.json")
    names = run("transfer/topology", 0, {})
    assert names["topo"].path("cuda:0", "mlx5_0").name == "PXB"  # as the page says
    assert "mlx5_0" in capsys.readouterr().out


def stored_names() -> dict:
    """What the pages' code of stores takes as given: the first two of four blocks are there."""
    return {
        "tokens": TOKENS,
        "blocks": [np.zeros(UNIT, np.uint8) for _ in range(2)],
        "new_blocks": [bytes(UNIT)] * 2,
        "cache": torch.zeros(UNIT // 2, dtype=torch.bfloat16),
        "torch": torch,
    }


def with_two_blocks(*arguments, **options) -> Store:
    store = Store.create(*arguments, **options)
    store.put_each(mk.block_hashes(TOKENS, 256)[:2], [b"\1" * UNIT] * 2)
    return store


def test_store_page_runs(tmp_path):
    given = {**stored_names(), "prepared": with_two_blocks}
    pool = repr(str(tmp_path / "kv"))
    names = run("store/store", 0, given, pool=pool, pool_bytes="1 << 20", create="prepared(")
    with names["store"] as store:
        assert all((block == 1).all() for block in names["blocks"])
        assert store.match_prefix(names["keys"]) == 4


def test_block_names_on_the_store_page():
    tokens = np.arange(2048)
    names = run("store/store", 1, {"mk": mk, "tokens": tokens, "image_hash": b"h" * 32})
    plain = mk.block_hashes(tokens, 256, cu_seqlens=[0, 1024, 2048])
    assert len(names["keys"]) == 8
    assert not np.isin(names["keys"][:4], plain).any(), "of another adapter and tenant"
    np.testing.assert_array_equal(names["keys"][4:], plain[4:])


def test_store_cluster_page_runs(tmp_path):
    given = {**stored_names(), "prepared": with_two_blocks, "secret": "s" * 32}
    places = {"pool": repr(str(tmp_path / "kv")), "pool_bytes": "1 << 20", "create": "prepared("}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mooncake_serving.store.directory.connect", lambda url, cluster: EmbeddedDirectory()
        )
        names = run("store/cluster", 0, given, **places, address="127.0.0.1:0")
    assert names["num_blocks"] == 2 and all((block == 1).all() for block in names["blocks"])


def test_store_directory_page_runs(monkeypatch):
    directory = EmbeddedDirectory()
    monkeypatch.setattr("mooncake_serving.store.directory.connect", lambda *_, **__: directory)
    directory.join(Member("node-2", "b", "pool-2"), ttl_s=10)
    keys = [(1, 0), (2, 0)]
    run("store/directory", 0, {"keys": keys})
    assert directory.match_prefix(keys) == []


def test_store_ssd_page_runs(tmp_path):
    given = {"keys": [1, 2], "blocks": [np.ones(UNIT, np.uint8) for _ in range(2)]}
    pool, ssd = repr(str(tmp_path / "kv")), str(tmp_path / "ssd")
    sizes = {"pool_bytes": "1 << 20", "ssd_bytes": "1 << 29"}
    run("store/ssd", 0, given, pool=pool, ssd=ssd, **sizes)
    with SsdTier(ssd, 1 << 29) as tier:  # which one process at a time may have
        assert tier.stats().is_writable


def test_the_pool_of_several_users_of_store(tmp_path):
    me = {'"kv"': repr(grp.getgrgid(os.getgid()).gr_name), '"engine"': repr(getpass.getuser())}
    sizes = {'"/dev/shm/kv"': repr(str(tmp_path / "pool")), "64 << 30": "1 << 20"}
    names = run_block("store/store", 4, {"ObjectPool": mk.ObjectPool}, sizes | me)
    assert len(names["pool"].objects().keys) == 0


def test_store_admin(tmp_path, monkeypatch, capsys):
    """The server and the events, in the order of the page; then what a subscriber hears."""
    path, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    ports = {"tcp://127.0.0.1:5557": path, "tcp://127.0.0.1:5558": replay}
    here = {'"/dev/shm/kv"': repr(str(tmp_path / "kv")), "64 << 30": "1 << 20"}
    names = run_block("store/admin", 0, {}, ports | here)
    store = names["store"]
    with names["publisher"], names["events"], store:
        store.put(7, b"value")
        run_block(
            "store/admin", 1, names | {"time": type("", (), {"sleep": lambda s: store.get(7)})}
        )
        run_block("store/admin", 2, names, {"~/kv/": f"{tmp_path}/"})
        heard: list = []
        note = {"            ...\n        for": "            pass\n        for"}
        note |= {
            "in batch.events:\n            ...": "in batch.events:\n            heard.append(event)"
        }
        note |= {"for batch in batches:": "for batch in until_heard(batches):"}

        def until_heard(batches):
            for batch in batches:
                yield batch
                if heard:
                    return

        run_block("store/admin", 3, {"heard": heard, "until_heard": until_heard}, ports | note)
    assert capsys.readouterr().out.startswith("1.0\n") and heard


def test_metrics():
    pytest.importorskip("prometheus_client")
    with (
        mk.TransferEngine(transports=["tcp"]) as engine,
        mk.TransferEngine(transports=["tcp"]) as other,
    ):
        source, target = np.ones(UNIT, np.uint8), np.zeros(UNIT, np.uint8)
        region, theirs = engine.register(source), other.register(target)
        peer = engine.open(other.name)
        engine.write(peer, [(region.address, theirs.address, UNIT)]).wait()
        names = {"mk": mk, "engine": engine, "region": region, "peer": peer}
        names["remote_address"] = theirs.address
        run_block("transfer/metrics", 0, names, {"10.0.0.2:4711": other.name})
        run_block("transfer/metrics", 1, names, {"9400": "0"})
        names["REGISTRY"].unregister(names["collector"])


def test_the_copies_of_store_cluster(hosts):
    made = hosts.several(3)
    cluster, node = made[0].cluster, made[0].node
    keys = [5, 6]
    names = {"cluster": cluster, "node": node, "key": 5, "keys": keys, "block": b"v" * UNIT}
    names["ClusterStore"] = type(cluster)
    places = {"10.0.0.7:4000": made[1].node.name, "10.0.0.9:4000": made[2].node.name}
    run_block("store/cluster", 1, names, places)
