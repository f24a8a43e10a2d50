"""Model files that were written to do harm: a clear error, soon, and nothing read elsewhere."""

import contextlib
import json
import os
import random
import shutil
import struct

import pytest

from mooncake_serving.engine import InvalidModel, UnsupportedModel, load_model

INDEX = "model.safetensors.index.json"
UINT8, UINT64, ARRAY, STRING = 0, 10, 9, 8


def test_shard_outside_the_folder_is_rejected(folder_writer, tmp_path):
    folder = folder_writer()
    shutil.copy(folder / "model.safetensors", tmp_path / "outside.safetensors")
    (folder / "below").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "below" / "model.safetensors")
    for name in (
        str(tmp_path / "outside.safetensors"), "../outside.safetensors", "below/model.safetensors",
        "./model.safetensors", "..", ".", "", "model.safetensors\0", "/dev/zero", "a/../../b",
    ):  # fmt: skip
        (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(InvalidModel, match="weight_map of .* must name files of its folder"):
            load_model(folder)


def test_symlinks_placed_by_the_owner_are_followed(folder_writer, tmp_path):
    """As in Hugging Face's cache: snapshots/<revision>/<file> leads to ../../blobs/<hash>."""
    folder = folder_writer(num_shards=2)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load_model(snapshot)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", INDEX, "model.safetensors"])
def test_special_files_are_not_opened(folder_writer, name):
    folder = folder_writer()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)  # a read would wait forever
    if name == INDEX:
        load_model(folder)
    else:
        with pytest.raises(InvalidModel, match=f"has no {name}"):
            load_model(folder)


def test_oversized_files_are_rejected(folder_writer):
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        folder = folder_writer()
        with open(folder / name, "w") as file:
            file.truncate(1 << 40)  # takes no disk
        with pytest.raises(InvalidModel, match=rf"{name} must have at most 268435456 bytes, got"):
            load_model(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize("depth", ["[" * 200_000, '{"a":' * 200_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_deeply_nested_json_is_rejected(folder_writer, name, depth):
    folder = folder_writer()
    (folder / name).write_text(depth)
    with pytest.raises(InvalidModel, match=f"{name} is (not JSON|damaged)"):
        load_model(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9}, {"vocab_size": 10**30}, {"hidden_size": -64},
        {"head_dim": 10**12}, {"head_dim": -2}, {"intermediate_size": 2**63},
        {"max_position_embeddings": 2**80}, {"rope_theta": 10**400}, {"rms_norm_eps": -1},
        {"rms_norm_eps": 10**400}, {"num_attention_heads": 10**9}, {"num_key_value_heads": -4},
    ],
)  # fmt: skip
def test_absurd_config_numbers_are_rejected(folder_writer, change):
    with pytest.raises(InvalidModel):
        load_model(folder_writer(config=change))


def header(*values: bytes, num_tensors: int = 0, num_values: int | None = None) -> bytes:
    """The beginning of a GGUF file."""
    count = len(values) if num_values is None else num_values
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(values)


def string(text: bytes, num_bytes: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if num_bytes is None else num_bytes) + text


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    return string(b"key") + struct.pack("<IIQ", ARRAY, kind, count) + content


@pytest.mark.parametrize(
    "content",
    [
        header(num_values=2**64 - 1),
        header(num_tensors=2**64 - 1),
        header(listed(UINT8, 2**40)),
        header(listed(UINT64, 2**64 - 1)),
        header(listed(STRING, 2**40)),
        header(listed(ARRAY, 2**40)),
        header(listed(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 100_000)),
        header(string(b"key", 2**63)),
        header(string(b"key") + struct.pack("<I", 99)),
        header(string(b"key") + struct.pack("<I", STRING) + string(b"x", 2**62)),
        header(string(b"general.alignment") + struct.pack("<II", 4, 0)),
        header(num_tensors=1) + string(b"t") + struct.pack("<I", 2**32 - 1),
        header(num_tensors=1) + string(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0),
        header(num_tensors=1) + string(b"t") + struct.pack("<IQIQ", 1, 2**60, 0, 0),
        header(num_tensors=1) + string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**63),
        header(num_tensors=1) + string(b"t") + struct.pack("<IQIQ", 1, 4, 12345, 0),
        header(string(b"\xff") + struct.pack("<II", 4, 0)),
        header(),
    ],
)
def test_malformed_gguf_headers_are_rejected(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(InvalidModel):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_load_or_raise_invalid_model(gguf_writer, folder_writer, seed):
    chance = random.Random(seed)
    folder = folder_writer()
    path = gguf_writer() if seed % 2 else folder / chance.choice(["config.json", "tokenizer.json"])
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(min(len(content), 6000))] = chance.randrange(256)
    path.write_bytes(content)
    with contextlib.suppress(InvalidModel, UnsupportedModel):
        load_model(path if seed % 2 else folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", ["a", "b"], ""), ("token_type", ["x"] * 3, ""), ("merges", [1, 2], ""),
        *(("bos_token_id", wrong, "bos_token_id must be below") for wrong in (-1, 2**31, "2", [1])),
    ],
)  # fmt: skip
def test_malformed_gguf_tokenizers_are_rejected(gguf_writer, monkeypatch, key, value, message):
    from mooncake_serving.engine.gguf_weights import GgufFile

    plain = GgufFile.metadata

    def metadata(file, name, default=None):
        return value if name == f"tokenizer.ggml.{key}" else plain(file, name, default)

    monkeypatch.setattr(GgufFile, "metadata", metadata)
    with pytest.raises(InvalidModel, match=message):
        load_model(gguf_writer())
