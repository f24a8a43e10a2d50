"""A folder in Hugging Face's layout: config.json, safetensors (one file or shards), tokenizer."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .errors import InvalidModel
from .hf_config import model_config_from_hf
from .tokenizer import Tokenizer

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsFolder:
    """Find tensors by name over all shards of a folder; each file is opened once, memory-mapped.

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
        settings = self._json("tokenizer_config.json", required=False)
        return Tokenizer(
            tokenizers.Tokenizer.from_file(str(path)),
            chat_template=self._chat_template(settings),
            bos_token=_token_text(settings.get("bos_token")),
            eos_token=_token_text(settings.get("eos_token")),
        )

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            return sorted(set(self._json(INDEX)["weight_map"].values()))
        return [SINGLE]

    def _open(self, name: str) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise InvalidModel(f"load_model: {self.folder} has no {name}")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise InvalidModel(f"load_model: {path} is damaged: {error}") from error

    def _json(self, name: str, *, required: bool = True) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            if required:
                raise InvalidModel(f"load_model: {self.folder} has no {name}")
            return {}
        try:
            parsed: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidModel(f"load_model: {path} is not JSON: {error}") from error
        return parsed


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    """Return a token's text, which the file gives plainly or inside a description."""
    return token["content"] if isinstance(token, dict) else token
