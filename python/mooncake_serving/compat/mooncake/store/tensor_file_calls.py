"""The calls of ``MooncakeDistributedStore`` that move a tensor to and from a safetensors file."""

import os
from typing import Any

import torch

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.extras import needed_from

from ..codes import Failed
from .codes import FILE_NOT_FOUND, log, returns_code, returns_instead
from .naming import encoded
from .tensor_calls import TensorCalls


class TensorFileCalls(TensorCalls):
    """A file has the tensor under the name of its key. File names are used as they are given."""

    @returns_code
    def save_tensor_to_safetensor(
        self, key: str, file_name: str | os.PathLike[str] | None = None
    ) -> int:
        """Write a tensor into a file, by default of the key's name, which it replaces as a whole.

        Returns:
            0; -1100 if there is no such tensor, -600 if the file cannot be written.
        """
        path = _path(key if file_name is None else file_name)
        safetensors = _safetensors()
        if (tensor := self.get_tensor(key)) is None:
            raise Failed(FILE_NOT_FOUND, f"there is no tensor of {key!r:.80}")
        try:
            safetensors.torch.save_file({key: tensor}, path)
        except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
            raise InvalidArgument(f"{path!r:.200} cannot be written: {error}") from None
        return 0

    @returns_instead(None)
    def load_tensor_from_safetensor(
        self, key: str | None = None, file_name: str | os.PathLike[str] | None = None
    ) -> torch.Tensor | None:
        """Store a tensor of a file, unless the key has a value, and return it.

        Args:
            key: its name in the store and in the file; None: that of the file, and the first
                tensor there, which is also read, with a warning, if there is none of the key.
            file_name: must be given.

        Returns:
            The tensor; None if it cannot be read or stored.
        """
        if file_name is None:
            raise TypeError("load_tensor_from_safetensor() missing 1 required argument 'file_name'")
        path = _path(file_name)
        name = path if key is None else key
        encoded(name)  # refuses invalid names
        safetensors = _safetensors()
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor = _tensor_in(file, path, name, is_given=key is not None)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InvalidArgument(f"{path!r:.200} cannot be read: {error}") from None
        self._put_tensor(name, tensor)
        return tensor


def _tensor_in(file: Any, path: str, name: str, *, is_given: bool) -> torch.Tensor:
    """The tensor of this name, or the first."""
    names = [*file.keys()]
    if not names:
        raise InvalidArgument(f"{path!r:.200} must have a tensor, got none")
    if is_given and name not in names:
        log.warning("%.200r has no tensor %.80r: %.80r is loaded", path, name, names[0])
    # A copy: what is mapped does not outlive a truncation of the file.
    return file.get_tensor(name if name in names else names[0]).clone()


def _path(file_name: Any) -> str:
    try:
        path = os.fspath(file_name)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise InvalidArgument(f"file_name must be a path, got {file_name!r:.80}")
    return path


def _safetensors() -> Any:
    try:
        with needed_from("serving", __name__):
            import safetensors.torch
    except ModuleNotFoundError as error:
        raise Unavailable(str(error)) from None
    return safetensors
