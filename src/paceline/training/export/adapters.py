"""The adapters of a run alone, as a folder in the format of peft, written without peft."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RunError, TaskError
from paceline.files import new_folder
from paceline.hf.export import TrainedModel
from paceline.hf.folder import CONFIG, ModelFolder, open_folder
from paceline.hf.lora import A, B, LoraLinear
from paceline.hf.objectives import CAUSAL_LM, CLASSIFICATION, SEQ2SEQ, choose_objective
from paceline.hf.task import build_model
from paceline.hf.weights import FolderWeights
from paceline.spec import HF_TASK, Spec
from paceline.training.init.pretrained import PretrainedWeights

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of each tensor, which peft finds in the model that it wraps
TASK_TYPES = {CAUSAL_LM: "CAUSAL_LM", SEQ2SEQ: "SEQ_2_SEQ_LM", CLASSIFICATION: "SEQ_CLS"}


def find_base(spec: Spec) -> ModelFolder:
    """Return the folder whose model the adapters of a run change. Raises RunError and TaskError."""
    if spec.task != HF_TASK or spec.set.get("lora") is None:
        raise RunError(
            f"--adapters requires a run of hf:FOLDER with --set lora.rank=16, got task {spec.task}"
            f"{' without adapters' if spec.task == HF_TASK else ''}; use --format safetensors"
        )
    folder = open_folder(spec.set["folder"])
    if not folder.has_weights:
        raise RunError(
            f"the run started from random weights ({folder.path / CONFIG}), which no folder has, so its "
            "adapters alone do not give its model; use --format hf, which merges them"
        )
    return folder


def write_adapters(weights: Mapping[str, Tensor], trained: TrainedModel, base: ModelFolder, out: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors to the new folder `out`.

    The folder appears after its tensors were read again and compared. Returns the number of adapted layers.

    weights: whole tensors by their names in the model. base: the model without adapters, whose weights must
        be the frozen ones of the run.

    Raises RunError and TaskError.
    """
    assert trained.lora is not None
    with torch.device("meta"):
        model: Any = build_model(base, trained.objective, trained.labels, trained.lora)
    _check_base(weights, model, base)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    heads = _find_trained_modules(model)
    tensors = _name_tensors(weights, model, layers)
    config = {
        "peft_type": "LORA",
        "task_type": TASK_TYPES.get(choose_objective(trained.objective, base)),
        "base_model_name_or_path": str(base.path.absolute()),
        "inference_mode": True,
        "r": trained.lora.rank,
        "lora_alpha": trained.lora.resolved_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(layer.is_transposed for layer in layers.values()),
        "target_modules": _choose_targets(model, layers),
        "modules_to_save": heads or None,
    }
    with new_folder(out) as temporary:
        (temporary / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _write_tensors(tensors, temporary / ADAPTER_WEIGHTS)
    return len(layers)


def _check_base(weights: Mapping[str, Tensor], model: nn.Module, base: ModelFolder) -> None:
    """Raise TaskError unless the frozen weights are those of the folder.

    model: with adapters, on the meta device.
    """
    source = PretrainedWeights(FolderWeights(base.path), model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            continue
        if name not in source.tensors:
            raise TaskError(
                f"{base.path} has no weights for {name}, which stayed at its random values, so the adapters "
                "alone do not give the model of the run; use --format hf, which merges them"
            )
        if not torch.equal(source.read(name).to(weights[name].dtype), weights[name]):
            raise TaskError(
                f"{name} in {base.path} differs from the weights that the run started from, so the adapters "
                "do not fit it; restore the folder, or use --format hf, which merges them"
            )


def _find_trained_modules(model: nn.Module) -> list[str]:
    """Return the children of a model that are trained as a whole, such as a new classifier."""
    return [
        name
        for name, child in model.named_children()
        if not any(isinstance(module, LoraLinear) for module in child.modules())
        and any(parameter.requires_grad for parameter in child.parameters())
    ]


def _name_tensors(
    weights: Mapping[str, Tensor], model: nn.Module, layers: Mapping[str, LoraLinear]
) -> dict[str, Tensor]:
    """Return the trained tensors by the names that peft gives them."""
    added = {f"{layer}.{part}": f"{layer}.{part}.weight" for layer in layers for part in (A, B)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {PREFIX + added.get(name, name): weights[name].contiguous() for name in trained}


def _choose_targets(model: nn.Module, layers: Mapping[str, LoraLinear]) -> list[str]:
    """Return what peft adapts: last parts of names if they select these layers only, else whole names."""
    last_parts = {name.rpartition(".")[2] for name in layers}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if selected == layers.keys() else layers)


def _write_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write tensors, and read them again. Raises RunError if they differ."""
    from safetensors.torch import load_file, save_file

    save_file(tensors, file, {"format": "pt"})
    written = load_file(file)
    if written.keys() != tensors.keys() or any(
        not torch.equal(written[name], value) for name, value in tensors.items()
    ):
        raise RunError(f"{file.name} has other values than were written; check the disk")
