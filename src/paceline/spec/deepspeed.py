"""The configuration of DeepSpeed, a JSON file, as a request of Paceline."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.files import reason
from paceline.spec.request import build

PLANS = ("ddp", "zero1", "zero2", "zero3")
OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd", "Lamb": "lamb", "Lion": "lion"}
OPTIMIZERS |= {"Adagrad": "adagrad", "FusedAdam": "adamw", "CPUAdam": "adamw"}
OPTIMIZER_KEYS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")
# keys that do not change what is computed, or that Paceline decides by measurement
WITHOUT_EFFECT = {
    "steps_per_print": "paceline train shows the progress by itself",
    "wall_clock_breakdown": "use paceline train --profile",
    "dump_state": "run.toml in the run folder has all settings",
    "memory_breakdown": "use paceline train --profile",
    "flops_profiler": "use paceline train --profile",
    "tensorboard": "see docs/tensorboard.md",
    "csv_monitor": "the run folder has metrics",
    "wandb": "see docs/trackers.md",
    "comms_logger": "use paceline comms",
    "zero_allow_untested_optimizer": "paceline refuses what it cannot compute exactly",
    "zero_force_ds_cpu_optimizer": "there is no offload",
    "communication_data_type": "gradients are reduced in their own type",
    "prescale_gradients": "gradients are averaged",
    "gradient_predivide_factor": "gradients are averaged",
    "disable_allgather": "paceline chooses the collectives",
    "seq_parallel_communication_data_type": "paceline chooses the types",
}


@dataclass
class Translation:
    """tree: keys of a request. notes: what has no counterpart, a sentence for each."""

    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def translate(path: Path) -> Translation:
    """Return the request that corresponds to a DeepSpeed JSON file, with checked values.

    Raises SpecError if the file cannot be read, or if it asks for something that Paceline cannot do.
    """
    config = _read(path)
    result = Translation()
    plan = _translate_zero(config.pop("zero_optimization", {}))
    microbatches = _translate_batch(config, result)
    result.tree["plan"] = f"{plan},microbatches={microbatches}" if microbatches > 1 else plan
    _translate_precision(config, result.tree)
    optimizer = _translate_optimizer(config.pop("optimizer", None), result)
    if (clip := config.pop("gradient_clipping", None)) is None:
        result.notes.append(
            "gradient_clipping is missing: set optimizer.clip to 1 if your DeepSpeed clips at 1"
        )
    elif clip == "auto":
        result.notes.append("gradient_clipping is auto: set optimizer.clip")
    elif clip:
        optimizer["clip"] = float(clip)
    _translate_schedule(config.pop("scheduler", None), optimizer, result)
    if optimizer:
        result.tree["optimizer"] = optimizer
    for key in list(config):
        if key in WITHOUT_EFFECT:
            result.notes.append(f"{key} is not needed: {WITHOUT_EFFECT[key]}")
        elif not (isinstance(config[key], Mapping) and config[key].get("enabled") is False):
            raise SpecError(f"{path}: {key} has no counterpart in Paceline; remove it to train without it")
    build(result.tree)  # types and ranges
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {path}: {reason(error)}; expected a DeepSpeed JSON file") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path} contains {type(config).__name__}; expected a JSON object")
    return config


def _table(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{key} must be a JSON object, got {value!r:.60}")
    return value


def _translate_zero(value: Any) -> str:
    zero = _table(value, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in range(4) or isinstance(stage, bool):
        raise SpecError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r:.40}")
    for key in ("offload_optimizer", "offload_param"):
        device = zero.get(key) or {}
        if _table(device, f"zero_optimization.{key}").get("device", "none") != "none":
            raise SpecError(
                f"zero_optimization.{key} is set, but Paceline keeps everything on the device; "
                "remove it, and use more ranks or zero3 with recompute=full"
            )
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            raise SpecError(f"zero_optimization.{key} has no counterpart in Paceline; remove it")
    return PLANS[stage]


def _count(config: dict[str, Any], key: str, notes: list[str]) -> int | None:
    value = config.pop(key, None)
    if value == "auto":
        notes.append(f"{key} is auto: it is left out")
        return None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise SpecError(f"{key} must be an integer of at least 1, got {value!r:.40}")
    return value


def _translate_batch(config: dict[str, Any], result: Translation) -> int:
    """Set batch and ranks. Return the number of micro-batches. DeepSpeed: batch = micro · steps · ranks."""
    batch = _count(config, "train_batch_size", result.notes)
    micro = _count(config, "train_micro_batch_size_per_gpu", result.notes)
    steps = _count(config, "gradient_accumulation_steps", result.notes)
    if batch is None:
        if micro is not None:
            result.notes.append(
                f"train_batch_size is missing: set batch to {micro * (steps or 1)} times the number of ranks"
            )
        return steps or 1
    result.tree["batch"] = batch
    if micro is not None and steps is not None:
        if batch % (micro * steps):
            raise SpecError(
                f"train_batch_size {batch} is not divisible by train_micro_batch_size_per_gpu {micro} · "
                f"gradient_accumulation_steps {steps}; correct one of them"
            )
        result.tree["ranks"] = batch // (micro * steps)
    elif micro is not None:
        result.notes.append(
            f"gradient_accumulation_steps is missing: on R ranks, add microbatches={batch // micro}/R to plan"
        )
    return steps or 1


def _translate_precision(config: dict[str, Any], tree: dict[str, Any]) -> None:
    enabled = [
        key
        for key in ("bf16", "fp16")
        if _table(config.pop(key, {}), key).get("enabled", False) not in (False, "auto")
    ]
    if len(enabled) > 1:
        raise SpecError("bf16 and fp16 are both enabled; enable only one")
    if enabled:
        tree["precision"] = enabled[0]


def _translate_optimizer(value: Any, result: Translation) -> dict[str, Any]:
    if value is None:
        return {}
    table = _table(value, "optimizer")
    kind, params = table.get("type"), dict(_table(table.get("params", {}), "optimizer.params"))
    if kind not in OPTIMIZERS:
        raise SpecError(f"no such optimizer in Paceline: {kind!r:.40}; use one of {', '.join(OPTIMIZERS)}")
    name = OPTIMIZERS[kind]
    is_decoupled = params.pop("adam_w_mode", True)
    params.pop("torch_adam", None)
    if kind in ("Adam", "FusedAdam", "CPUAdam") and not is_decoupled:
        name = "adam"
    optimizer: dict[str, Any] = {"name": name}
    for key, given in params.items():
        if given == "auto":
            result.notes.append(f"optimizer.params.{key} is auto: set optimizer.{key}")
        elif key in OPTIMIZER_KEYS:
            optimizer[key] = given
        elif key != "bias_correction" or given is not True:
            raise SpecError(f"optimizer.params.{key} has no counterpart in Paceline; remove it")
    if name in ("adamw", "lamb", "lion"):
        optimizer.setdefault("weight_decay", 0.0)  # DeepSpeed's default; Paceline's may differ
    return optimizer


def _translate_schedule(value: Any, optimizer: dict[str, Any], result: Translation) -> None:
    if value is None:
        return
    table = _table(value, "scheduler")
    kind, params = table.get("type"), dict(_table(table.get("params", {}), "scheduler.params"))
    names = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind not in names:
        raise SpecError(f"no such schedule in Paceline: {kind!r:.40}; use one of {', '.join(names)}")
    for key in [key for key, given in params.items() if given == "auto"]:
        result.notes.append(f"scheduler.params.{key} is auto: see the keys of schedule")
        params.pop(key)
    schedule: dict[str, Any] = {"name": names[kind]}
    steps = params.pop("warmup_num_steps", 1000)
    schedule["warmup"] = f"{steps} steps"
    if kind == "WarmupCosineLR":
        schedule["start"] = params.pop("warmup_min_ratio", 0.0)
        schedule["floor"] = params.pop("cos_min_ratio", 0.0001)
    else:
        top = params.pop("warmup_max_lr", None)
        if top is not None:
            optimizer["lr"] = top
        low = params.pop("warmup_min_lr", 0.0)
        schedule["start"] = low / optimizer["lr"] if "lr" in optimizer else 0.0
        if params.pop("warmup_type", "log") == "log":
            result.notes.append("the warm-up of DeepSpeed is logarithmic here; that of Paceline is linear")
    if (total := params.pop("total_num_steps", None)) is not None:
        result.tree["steps"] = total
    if params:
        raise SpecError(f"scheduler.params.{min(params)} has no counterpart in Paceline; remove it")
    result.tree["schedule"] = schedule
