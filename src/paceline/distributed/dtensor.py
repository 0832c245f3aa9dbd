"""Functions for DTensors that do not import torch.distributed.tensor, which takes 0.6 s."""

from typing import Any

from torch import Tensor

from paceline.plan.plan import MeshCoordinate


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def is_materialized(tensor: Tensor) -> bool:
    """Return whether this rank has storage for a tensor: other stages' tensors stay on the meta device."""
    return tensor.device.type != "meta"


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank."""
    dtensor: Any = tensor
    return dtensor.to_local() if is_dtensor(tensor) else tensor


def shard_size(size: int, parts: int) -> int:
    """Return the length of each part of a dimension; the last part may be shorter."""
    return -(-size // parts)


def has_no_empty_shard(size: int, parts: int) -> bool:
    """Return whether each part of a dimension of `size` has at least one element."""
    return shard_size(size, parts) * (parts - 1) < size


def storage_id(tensor: Tensor) -> int:
    """Return an id of the storage of a tensor; views share it."""
    return tensor.untyped_storage()._cdata


def is_first_replica(tensor: Tensor, place: MeshCoordinate) -> bool:
    """Return whether this rank is the first with its shard of `tensor`, a DTensor.

    `tensor` is sharded along at least one axis of its mesh.
    """
    dtensor: Any = tensor
    coordinates = dtensor.device_mesh.get_coordinate() or ()
    if place.tp and "tp" not in (dtensor.device_mesh.mesh_dim_names or ()):
        return False
    return not any(
        coordinate
        for coordinate, placement in zip(coordinates, dtensor.placements, strict=True)
        if placement.is_replicate()
    )
