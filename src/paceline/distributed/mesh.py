"""Device meshes of a plan, and their destruction."""

import sys
from weakref import ref

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.plan.plan import ResolvedPlan

_meshes: list[ref[DeviceMesh]] = []


def build_mesh(plan: ResolvedPlan, device: torch.device) -> DeviceMesh:
    """Return the mesh of a plan, with the axes of `pp`, `replicate`, `shard`, `tp` that the plan uses.

    The ranks that share a sequence (cp) are data ranks here. Parameters that are not sharded are replicated.
    """
    data = plan.dp * plan.cp
    replicate = plan.replicate if plan.zero >= 2 else data
    sizes = {"pp": plan.pp, "replicate": replicate, "shard": data // replicate, "tp": plan.tp}
    _clear_dtensor_cache()
    return _init_mesh({name: size for name, size in sizes.items() if size > 1 or name == "shard"}, device)


def build_cp_mesh(plan: ResolvedPlan, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks that share a sequence with this rank."""
    sizes = {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
    return _init_mesh({name: size for name, size in sizes.items() if size > 1}, device)["cp"]


def select_data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh of the axes `replicate` and `shard`."""
    assert mesh.mesh_dim_names is not None
    axes = tuple(name for name in mesh.mesh_dim_names if name in ("replicate", "shard"))
    return mesh[axes] if axes != mesh.mesh_dim_names else mesh


def destroy_meshes() -> None:
    """Remove the process groups from all meshes, at the end of a training.

    torch 2.13, gloo: DTensor keeps meshes as cache keys, and meshes keep their process groups after these are
    destroyed, each with three threads that wake a hundred times a second.
    """
    while _meshes:
        getattr(_meshes.pop()(), "_pg_registry", {}).clear()


def _init_mesh(axes: dict[str, int], device: torch.device) -> DeviceMesh:
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _meshes.append(ref(mesh))
    return mesh


def _clear_dtensor_cache() -> None:
    """Clear DTensor's cache of sharding decisions.

    torch 2.13: it reuses decisions for a mesh with the same ranks, whose process groups may no longer exist.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
