"""Named meshes of ranks, and letting go of them."""

import sys
from weakref import ref

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.plan.plan import ResolvedPlan

_meshes: list[ref[DeviceMesh]] = []


def build_mesh(plan: ResolvedPlan, device: torch.device) -> DeviceMesh:
    """The mesh of a plan. Of its axes `pp`, `replicate`, `shard`, `tp` those that the plan has; the ranks
    that share a sequence are data ranks here, and parameters that are not cut are replicated."""
    data = plan.dp * plan.cp
    replicate = plan.replicate if plan.zero >= 2 else data
    sizes = {"pp": plan.pp, "replicate": replicate, "shard": data // replicate, "tp": plan.tp}
    _clear_dtensor_cache()
    return _init_mesh({name: size for name, size in sizes.items() if size > 1 or name == "shard"}, device)


def build_cp_mesh(plan: ResolvedPlan, device: torch.device) -> DeviceMesh:
    """The ranks that share a sequence with this one."""
    sizes = {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
    return _init_mesh({name: size for name, size in sizes.items() if size > 1}, device)["cp"]


def select_data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that parameters are replicated and sharded over."""
    assert mesh.mesh_dim_names is not None
    axes = tuple(name for name in mesh.mesh_dim_names if name in ("replicate", "shard"))
    return mesh[axes] if axes != mesh.mesh_dim_names else mesh


def destroy_meshes() -> None:
    """At the end of a training: DTensor keeps meshes as keys of what it has worked out, and meshes keep their process groups, with
    three threads each that wake a hundred times a second, after these are destroyed (torch 2.13, gloo)."""
    while _meshes:
        getattr(_meshes.pop()(), "_pg_registry", {}).clear()


def _init_mesh(axes: dict[str, int], device: torch.device) -> DeviceMesh:
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    _meshes.append(ref(mesh))
    return mesh


def _clear_dtensor_cache() -> None:
    """What DTensor has worked out for a mesh it takes for one with the same ranks, whose process groups may be gone (torch 2.13)."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
