"""Tensors that are cut over ranks (DTensor), told apart without importing torch.distributed.tensor, which takes 0.6 s."""

from typing import Any

from torch import Tensor

from paceline.plan.plan import MeshCoordinate


def is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")


def is_materialized(tensor: Tensor) -> bool:
    """Whether this rank holds any of a tensor: what belongs to other stages of a pipeline stays on the meta device."""
    return tensor.device.type != "meta"


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    cut: Any = tensor
    return cut.to_local() if is_dtensor(tensor) else tensor


def shard_size(size: int, parts: int) -> int:
    """How long all parts of a dimension are but the last, which may be shorter."""
    return -(-size // parts)


def has_no_empty_shard(size: int, parts: int) -> bool:
    """Whether each part of a dimension would have something."""
    return shard_size(size, parts) * (parts - 1) < size


def storage_id(tensor: Tensor) -> int:
    """Which memory a tensor lies in; views share it."""
    return tensor.untyped_storage()._cdata


def is_first_replica(tensor: Tensor, place: MeshCoordinate) -> bool:
    """Whether this rank is the first of those that hold the same shard. `tensor` is cut, along one axis of its mesh at the least."""
    cut: Any = tensor
    coordinates = cut.device_mesh.get_coordinate() or ()
    if place.tp and "tp" not in (cut.device_mesh.mesh_dim_names or ()):
        return False
    return not any(
        at for at, placement in zip(coordinates, cut.placements, strict=True) if placement.is_replicate()
    )
