"""A folder in Hugging Face's layout: config.json, safetensors (one file or shards), tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from mooncake_kernels.errors import shown

from .config import ModelConfig
from .errors import InvalidModel, damaged_if_it_fails
from .hf_config import model_config_from_hf
from .tokenizer import Tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_JSON_BYTES = 256 << 20  # of a file that is parsed as a whole


class SafetensorsFolder:
    """Find tensors by name over all shards of a folder; each file is opened once, memory-mapped.

    Files are read from the folder alone: what its files name is a name in it. It may hold symbolic
    links to anywhere, as Hugging Face's cache does, for who can place them there can read their
    targets, too.

    Args:
        folder: holds ``config.json``, ``model.safetensors`` or ``model.safetensors.index.json``
            with its shards, and ``tokenizer.json``.

    Raises:
        InvalidModel: a file is missing or cannot be read.
        UnsupportedModel: see ``model_config_from_hf``.
    """

    rope_factors: torch.Tensor | None = None  # the scaling is in config.json

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generation = self._json("generation_config.json", required=False)
        self.config: ModelConfig = model_config_from_hf(self._json("config.json"), generation)
        self._files = {name: self._open(name) for name in self._file_names()}
        self._home = {tensor: file for file in self._files.values() for tensor in file.keys()}  # noqa: SIM118
        self.names = self._home.keys()

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor in the dtype of its file."""
        tensor: torch.Tensor = self._home[name].get_tensor(name)
        return tensor

    def tokenizer(self) -> Tokenizer:
        """Read ``tokenizer.json`` and, where there is one, the chat template."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidModel(f"load_model: {self.folder} has no tokenizer.json")
        _check_size(path)
        settings = self._json("tokenizer_config.json", required=False)
        with damaged_if_it_fails(str(path)):
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return Tokenizer(
            tokenizer,
            chat_template=self._chat_template(settings),
            bos_token=self._token_text(settings, "bos_token"),
            eos_token=self._token_text(settings, "eos_token"),
        )

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            _check_size(path)
            try:
                return path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise InvalidModel(f"load_model: {path} is damaged: {error}") from error
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = (entry for entry in template if isinstance(entry, dict))
            template = next((e.get("template") for e in named if e.get("name") == "default"), None)
        return self._text("tokenizer_config.json", "chat_template", template)

    def _token_text(self, settings: dict[str, Any], name: str) -> str | None:
        """Return a token's text, which the file gives plainly or inside a description."""
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return self._text("tokenizer_config.json", name, token)

    def _text(self, file: str, name: str, value: Any) -> str | None:
        if not isinstance(value, str | None):
            raise InvalidModel(
                f"load_model: {name} of {self.folder / file} must be text, got {shown(value)}"
            )
        return value

    def _file_names(self) -> list[str]:
        if not (self.folder / INDEX).is_file():
            return [SINGLE]
        files = self._json(INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise InvalidModel(
                f"load_model: weight_map of {self.folder / INDEX} must map tensors to files, "
                f"got {shown(files)}"
            )
        names = sorted(set(files.values()))
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise InvalidModel(
                    f"load_model: weight_map of {self.folder / INDEX} must name files of its "
                    f"folder, got {shown(name)}"
                )
        return names

    def _open(self, name: str) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise InvalidModel(f"load_model: {self.folder} has no {name}")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, UnicodeDecodeError) as error:
            raise InvalidModel(f"load_model: {path} is damaged: {error}") from error

    def _json(self, name: str, *, required: bool = True) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            if required:
                raise InvalidModel(f"load_model: {self.folder} has no {name}")
            return {}
        _check_size(path)
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidModel(f"load_model: {path} is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise InvalidModel(f"load_model: {path} must hold an object, got {shown(parsed)}")
        return parsed


def _check_size(path: Path) -> None:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_JSON_BYTES:
        raise InvalidModel(
            f"load_model: {path} must have at most {MAX_JSON_BYTES} bytes, got {num_bytes}"
        )
