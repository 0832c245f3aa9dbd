"""The configuration of DeepSpeed, a JSON file, as a request of Paceline."""

import json
import math
import re
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
    "comet": "see docs/trackers.md",
    "comms_logger": "use paceline comms",
    "zero_allow_untested_optimizer": "paceline refuses what it cannot compute exactly",
    "zero_force_ds_cpu_optimizer": "there is no offload",
    "communication_data_type": "gradients are reduced in their own type",
    "prescale_gradients": "gradients are averaged",
    "gradient_predivide_factor": "gradients are averaged",
    "disable_allgather": "paceline chooses the collectives",
    "seq_parallel_communication_data_type": "paceline chooses the types",
    "activation_checkpointing": "use the plan key recompute=full or recompute=selective",
    "aio": "there is no offload",
    "checkpoint": "paceline has its own checkpoints",
    "nebula": "paceline has its own checkpoints",
    "autotuning": "use paceline plan",
    "log_level": "paceline has its own messages",
}
HINTS = {
    "tensor_parallel": "the plan key tp splits layers",
    "sequence_parallel_size": "the plan key cp splits sequences",
    "pipeline": "the plan keys pp and stages split a model into stages",
    "amp": "enable bf16 or fp16",
    "elasticity": "--nodes 2:4 trains on a varying number of nodes",
    "curriculum_learning": "spec.batch_schedule grows the batch",
}
ZERO_WITHOUT_EFFECT = re.compile(
    r"(stage3_\w+|\w*_bucket_size|contiguous_gradients|reduce_scatter|overlap_comm|allgather_partitions"
    r"|use_multi_rank_bucket_allreduce|load_from_fp32_weights|elastic_checkpoint|sub_group_size"
    r"|cpu_offload_use_pin_memory|(param|model)_persistence_threshold|max_live_parameters"
    r"|max_reuse_distance|gather_16bit_weights_on_model_save|ignore_unused_parameters|legacy_stage1"
    r"|round_robin_gradients|zero_hpz_partition_size|mics_hierarchical_params_gather"
    r"|memory_efficient_linear|pipeline_loading_checkpoint|override_module_apply"
    r"|log_trace_cache_warnings|enable_sanity_checks|leaf_module)"
)
OFFLOAD = "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"
QUANTIZED = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("zeropp_loco_param", "zenflow"),
)
LOSS_SCALE_KEYS = (
    *("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"),
    *("min_loss_scale", "loss_scale", "auto_cast"),
)
BF16_KEYS = ("immediate_grad_update", "check_grad_overflow")
# A comment, a comma before a closing bracket, or a text, in which both may occur.
COMMENT = re.compile(
    r'"(?:\\.|[^"\\\n])*"|(//|#)[^\n]*|/\*.*?\*/|,(?=(?:\s|//[^\n]*\n|#[^\n]*\n)*[\]}])', re.S
)
AUTO_SCHEDULE = {
    "warmup_num_steps": "set schedule.warmup",
    "total_num_steps": "set steps or epochs",
    "warmup_max_lr": "set optimizer.lr",
    "warmup_min_lr": "set schedule.start, a factor",
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
    _translate_precision(config, result)
    optimizer = _translate_optimizer(config.pop("optimizer", None), result)
    if (clip := config.pop("gradient_clipping", None)) is None:
        result.notes.append(
            "gradient_clipping is missing: set optimizer.clip to 1 if your DeepSpeed clips at 1"
        )
    elif clip == "auto":
        result.notes.append("gradient_clipping is auto: set optimizer.clip")
    elif _number(clip, "gradient_clipping"):
        optimizer["clip"] = float(clip)
    _translate_schedule(config.pop("scheduler", None), optimizer, result)
    if optimizer:
        result.tree["optimizer"] = optimizer
    for key in list(config):
        if key in WITHOUT_EFFECT:
            result.notes.append(f"{key} is not needed: {WITHOUT_EFFECT[key]}")
        elif not (isinstance(config[key], Mapping) and config[key].get("enabled") is False):
            hint = HINTS.get(key, "remove it to train without it")
            raise SpecError(f"{path}: {key} has no counterpart in Paceline; {hint}")
    build(result.tree)  # types and ranges
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        config = json.loads(_remove_comments(text), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {path}: {reason(error)}; expected a DeepSpeed JSON file") from None
    if not isinstance(config, dict):
        raise SpecError(f"{path} contains {type(config).__name__}; expected a JSON object")
    return config


def _remove_comments(text: str) -> str:
    """Return JSON without comments and last commas, which DeepSpeed accepts. Lines keep their numbers."""
    return COMMENT.sub(
        lambda found: found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0]), text
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"the key {twice[0]!r:.60} occurs twice")
    return dict(pairs)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise SpecError(f"{key} must be a number of at least 0, got {value!r:.40}")
    return value


def _table(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{key} must be a JSON object, got {value!r:.60}")
    return value


def _translate_zero(value: Any) -> str:
    zero = _table(value, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in range(4) or isinstance(stage, bool):
        raise SpecError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r:.40}")
    for key, given in zero.items():
        device = given.get("device") if isinstance(given, Mapping) else given
        if key in OFFLOAD and device not in (None, False, "none"):
            raise SpecError(
                f"zero_optimization.{key} is set, but Paceline keeps everything on the device; "
                "remove it, and use more ranks or zero3 with recompute=full"
            )
        if key in QUANTIZED and given:
            raise SpecError(f"zero_optimization.{key} has no counterpart in Paceline; remove it")
        if key == "mics_shard_size" and given not in (-1, 0):
            raise SpecError(
                f"zero_optimization.{key} shards within groups of ranks; remove it, and use the plan hsdp"
            )
        known = ("stage", "mics_shard_size", *OFFLOAD, *QUANTIZED)
        if key not in known and not ZERO_WITHOUT_EFFECT.fullmatch(key):
            raise SpecError(f"no such key: zero_optimization.{key}; correct or remove it")
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
    if batch % ((micro or 1) * (steps or 1)):
        parts = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        shown = " · ".join(f"{key} {value}" for key, value in parts.items() if value is not None)
        raise SpecError(f"train_batch_size {batch} is not divisible by {shown}; correct one of them")
    if micro is not None and steps is not None:
        result.tree["ranks"] = batch // (micro * steps)
    elif micro is not None:
        result.notes.append(
            f"gradient_accumulation_steps is missing: on R ranks, add microbatches={batch // micro}/R to plan"
        )
    return steps or 1


def _translate_precision(config: dict[str, Any], result: Translation) -> None:
    enabled = []
    for key, known in (("bf16", BF16_KEYS), ("fp16", LOSS_SCALE_KEYS), ("torch_autocast", ("dtype",))):
        table = dict(_table(config.pop(key, {}), key))
        given = table.pop("enabled", False)
        if given == "auto":
            result.notes.append(f"{key}.enabled is auto: set precision")
        elif not isinstance(given, bool):
            raise SpecError(f"{key}.enabled must be true, false or auto, got {given!r:.40}")
        if given is not True:
            continue
        enabled.append(key)
        if key == "torch_autocast":
            key = {"bfloat16": "bf16", "float16": "fp16"}.get(table.get("dtype", "bfloat16"), "")
        if not key:
            raise SpecError(f"torch_autocast.dtype must be bfloat16 or float16, got {table['dtype']!r:.40}")
        for name, value in table.items():
            if name not in known and value:
                raise SpecError(f"{key}.{name} has no counterpart in Paceline; remove it")
        if (scale := table.get("loss_scale")) not in (None, 0):
            raise SpecError(
                f"fp16.loss_scale={scale!r:.20} is fixed, but Paceline adapts the scale; set it to 0"
            )
        if key == "fp16":
            result.notes.append("fp16: the loss scale begins at 65536 and adapts by the rule of torch")
        result.tree["precision"] = key
    if len(enabled) > 1:
        raise SpecError(f"{' and '.join(enabled)} are both enabled; enable only one")


def _translate_optimizer(value: Any, result: Translation) -> dict[str, Any]:
    if value is None:
        return {}
    table = _table(value, "optimizer")
    params = dict(_table(table.get("params", {}), "optimizer.params"))
    by_name = {name.lower(): name for name in OPTIMIZERS}  # DeepSpeed ignores the case
    kind = by_name.get(str(table.get("type")).lower())
    if kind is None:
        raise SpecError(
            f"no such optimizer in Paceline: {table.get('type')!r:.40}; use one of {', '.join(OPTIMIZERS)}"
        )
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
    autos = [key for key, given in params.items() if given == "auto"]
    for key in autos:
        result.notes.append(
            f"scheduler.params.{key} is auto: {AUTO_SCHEDULE.get(key, 'see the keys of schedule')}"
        )
        params.pop(key)
    schedule: dict[str, Any] = {"name": names[kind]}
    steps = _number(params.pop("warmup_num_steps", 1000), "scheduler.params.warmup_num_steps")
    if "warmup_num_steps" not in autos:
        schedule["warmup"] = f"{steps} steps"
    if kind == "WarmupCosineLR":
        schedule["start"] = _number(params.pop("warmup_min_ratio", 0.0), "scheduler.params.warmup_min_ratio")
        schedule["floor"] = _number(params.pop("cos_min_ratio", 0.0001), "scheduler.params.cos_min_ratio")
    else:
        top = params.pop("warmup_max_lr", None)
        if top is not None:
            optimizer["lr"] = _number(top, "scheduler.params.warmup_max_lr")
        low = _number(params.pop("warmup_min_lr", 0.0), "scheduler.params.warmup_min_lr")
        if low and not optimizer.get("lr"):
            raise SpecError(
                f"scheduler.params.warmup_min_lr={low} needs a learning rate; set warmup_max_lr beside it"
            )
        schedule["start"] = low / optimizer["lr"] if low else 0.0
    warmup_type = params.pop("warmup_type", "log")
    if warmup_type not in ("log", "linear"):
        raise SpecError(f"scheduler.params.warmup_type must be log or linear, got {warmup_type!r:.40}")
    if warmup_type == "log":
        result.notes.append("the warm-up of DeepSpeed is logarithmic here; that of Paceline is linear")
    if (total := params.pop("total_num_steps", None)) is not None:
        result.tree["steps"] = total
    if params:
        raise SpecError(f"scheduler.params.{min(params)} has no counterpart in Paceline; remove it")
    result.notes.append(
        "the first two updates of DeepSpeed have the first rate: its schedule is a step later"
    )
    result.tree["schedule"] = schedule
