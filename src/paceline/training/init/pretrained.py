"""Pretrained weights from safetensors files."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.dtensor import local_tensor
from paceline.errors import TaskError
from paceline.hf.weight_files import TensorBytes, find_weight_files
from paceline.spec import suggest
from paceline.task import PretrainedSource, PretrainedTensor
from paceline.training.init.named_tensors import find_aliases, named_tensors

MAX_NAMES = 3  # tensors that a note names
DTYPES = {  # by their names in safetensors
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def find_pretrained_names(source: Path | PretrainedSource | None, model: nn.Module) -> frozenset[str]:
    """Return the parameters and buffers that pretrained weights have.

    Raises TaskError if the weights do not fit the model.
    """
    return frozenset(PretrainedWeights(source, model).tensors) if source is not None else frozenset()


class PretrainedWeights:
    """Weights from a file, or from the files that an index names.

    source: a safetensors file, an index, or a folder with either, whose tensors have the names of the
        model's; or a PretrainedSource, which knows their names in the model.
    model: on the meta device, before it is parallelized.

    Raises TaskError if the weights do not fit the model.
    """

    def __init__(self, source: Path | PretrainedSource, model: nn.Module):
        self._files: dict[str, Any] = {}  # name of a tensor -> its open file
        self._bytes: dict[Path, TensorBytes] = {}  # of files that were read without mapping them
        path = source if isinstance(source, Path) else source.path
        for file, names in find_weight_files(path):
            opened = _open(file)
            present = set(opened.keys())
            if missing := sorted((names or set()) - present):
                raise TaskError(
                    f"{file} lacks {missing[0]}, which the index {path} lists; download the weights again"
                )
            self._files.update(dict.fromkeys(sorted(present if names is None else names), (file, opened)))
        tied = find_aliases(model)
        found = (
            self._match_by_name(model, tied) if isinstance(source, Path) else source.match(model, self._files)
        )
        self.tensors: dict[str, PretrainedTensor] = {}  # by name in the model
        for name, tensor in found.items():
            self.tensors.setdefault(tied.get(name, name), tensor)
        self._check_shapes(model)
        added = () if isinstance(source, Path) else source.find_added(model)
        self.notes = tuple(self._find_notes(model, path, frozenset(added)))

    def _match_by_name(self, model: nn.Module, tied: Mapping[str, str]) -> dict[str, PretrainedTensor]:
        own = named_tensors(model)
        for key, (file, _) in self._files.items():
            if tied.get(key, key) not in own:
                raise TaskError(f"{file} has weights {key}, which the model lacks{suggest(key, own)}")
        return {key: PretrainedTensor((key,)) for key in self._files}

    def _check_shapes(self, model: nn.Module) -> None:
        own = named_tensors(model)
        for name, tensor in self.tensors.items():
            if tensor.combine is not None:
                continue
            [key] = tensor.keys
            file, opened = self._files[key]
            shape = tuple(opened.get_slice(key).get_shape())
            if shape != tuple(own[name].shape):
                raise TaskError(f"{file}: {key} has shape {shape}, the model's has {tuple(own[name].shape)}")

    def _find_notes(self, model: nn.Module, path: Path, added: frozenset[str]) -> list[str]:
        """Return what users should know. added: parameters that files of weights never have."""
        parameters = [name for name, _ in model.named_parameters() if name not in added]
        missing = [name for name in parameters if name not in self.tensors]
        used = {key for tensor in self.tensors.values() for key in tensor.keys}
        unused = [key for key in self._files if key not in used]
        notes = []
        if missing:
            notes.append(
                f"{len(missing)} of {len(parameters)} parameters are not in the pretrained weights {path} "
                f"and keep their initialization: {_abbreviate(missing)}"
            )
        if unused:
            notes.append(
                f"{len(unused)} of {len(self._files)} pretrained tensors are not used, because the model "
                f"lacks them: {_abbreviate(unused)}"
            )
        return notes

    def read(self, name: str) -> Tensor:
        """Return the whole tensor of this name in the model, on the CPU. Raises TaskError."""
        tensor = self.tensors[name]
        values = [self._files[key][1].get_tensor(key) for key in tensor.keys]
        return values[0] if tensor.combine is None else tensor.combine(values)

    def fill_shard_(self, name: str, tensor: Any) -> None:
        """Write the part of a tensor that this rank holds of a DTensor.

        Only this part is read from the file, if it is a block of the tensor in the file. Consecutive rows are
        read into the memory of the DTensor.
        """
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        stored, local = self.tensors[name], local_tensor(tensor)
        is_block = all(type(placement) in (Shard, Replicate) for placement in tensor.placements)
        if stored.combine is not None or not is_block:
            whole = self.read(name).to(tensor.device)
            distributed = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            local.copy_(local_tensor(distributed))
            return
        shape, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if not all(shape):
            return
        [key] = stored.keys
        is_consecutive = tuple(shape[1:]) == tuple(tensor.shape[1:]) and tuple(shape) == tuple(local.shape)
        first = offset[0] * math.prod(shape[1:]) if offset else 0
        if is_consecutive and self._read_consecutive(key, local, first):
            return
        block = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        local.copy_(self._files[key][1].get_slice(key)[block])

    def _read_consecutive(self, key: str, target: Tensor, first: int) -> bool:
        """Read elements of a tensor of a file from `first` on into `target`, if it can hold their bytes.

        Return whether it can.
        """
        file, _ = self._files[key]
        if file not in self._bytes:
            self._bytes[file] = TensorBytes(file)
        stored = self._bytes[file]
        is_same = DTYPES.get(stored.dtype(key)) == target.dtype
        if not is_same or target.device.type != "cpu" or not target.is_contiguous():
            return False
        memory: Any = target.detach().view(-1).view(torch.uint8).numpy()
        stored.read_into(memoryview(memory), key, first * target.element_size())
        return True


def _abbreviate(names: Collection[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join([*names][:MAX_NAMES]) + more


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TaskError(f"cannot read the pretrained weights {path}: {error}") from error
