"""Pretrained weights from safetensors files."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.spec import suggest
from paceline.training.init.named_tensors import find_aliases, named_tensors

INDEX = "model.safetensors.index.json"


def find_pretrained_names(path: Path | None, model: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that a file of pretrained weights has.

    Raises TaskError if the file does not fit the model.
    """
    return frozenset(PretrainedWeights(path, model).keys) if path is not None else frozenset()


class PretrainedWeights:
    """Weights from a file, or from the files that an index names.

    `path`: a safetensors file, an index, or a folder with either.
    """

    def __init__(self, path: Path, model: nn.Module):
        own, tied = named_tensors(model), find_aliases(model)
        self.keys: dict[str, tuple[Any, str]] = {}  # name in the model -> file, name in the file
        for file, keys in _find_files(path):
            opened = _open(file)
            present = set(opened.keys())
            if missing := sorted((keys or set()) - present):
                raise TaskError(
                    f"{file} lacks {missing[0]}, which the index {path} lists; download the weights again"
                )
            for key in sorted(present if keys is None else keys):
                name = tied.get(key, key)
                if name not in own:
                    raise TaskError(f"{file} has weights {key}, which the model lacks{suggest(key, own)}")
                shape = tuple(opened.get_slice(key).get_shape())
                if shape != tuple(own[name].shape):
                    raise TaskError(
                        f"{file}: {key} has shape {shape}, the model's has {tuple(own[name].shape)}"
                    )
                self.keys.setdefault(name, (opened, key))

    def read(self, name: str) -> Tensor:
        file, key = self.keys[name]
        return file.get_tensor(key)


def _find_files(path: Path) -> list[tuple[Path, set[str] | None]]:
    """Return each file with the names to read from it; None: all."""
    if path.is_dir():
        candidates = [file for file in (path / INDEX, path / "model.safetensors") if file.is_file()]
        if not candidates:
            raise TaskError(
                f"the folder {path} has neither {INDEX} nor model.safetensors; "
                "name a safetensors file in pretrained()"
            )
        path = candidates[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for key, file in weight_map.items():
            by_file.setdefault(file, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"cannot read the index of pretrained weights {path}: {error}; "
            "it needs a weight_map of names to files"
        ) from error
    if outside := [
        file
        for file in by_file
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file
    ]:
        raise TaskError(
            f"the index {path} names the file {outside[0]!r}; the files must be in the folder of the index"
        )
    return [(path.parent / file, keys) for file, keys in sorted(by_file.items())]


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TaskError(f"cannot read the pretrained weights {path}: {error}") from error
