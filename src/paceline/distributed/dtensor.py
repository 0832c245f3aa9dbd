"""Tensors that are cut over ranks (DTensor), told apart without importing torch.distributed.tensor, which takes 0.6 s."""

from typing import Any

from torch import Tensor

from paceline.plan.plan import MeshCoordinate


def is_cut(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def is_here(tensor: Tensor) -> bool:
    """Whether this rank holds any of a tensor: what belongs to other stages of a pipeline stays on the meta device."""
    return tensor.device.type != "meta"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    cut: Any = tensor
    return cut.to_local() if is_cut(tensor) else tensor


def longest(size: int, parts: int) -> int:
    """How long all parts of a dimension are but the last, which may be shorter."""
    return -(-size // parts)


def fits(size: int, parts: int) -> bool:
    """Whether each part of a dimension would have something."""
    return longest(size, parts) * (parts - 1) < size


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in; views share it."""
    return tensor.untyped_storage()._cdata


def is_first_copy(tensor: Tensor, place: MeshCoordinate) -> bool:
    """Whether this rank is the first of those that hold the same shard. `tensor` is cut, along one axis of its mesh at the least."""
    cut: Any = tensor
    coordinates = cut.device_mesh.get_coordinate() or ()
    if place.tp and "tp" not in (cut.device_mesh.mesh_dim_names or ()):
        return False
    return not any(
        at for at, placement in zip(coordinates, cut.placements, strict=True) if placement.is_replicate()
    )
