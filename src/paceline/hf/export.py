"""Write the weights of a run as a folder that `from_pretrained` loads, and check it by loading it."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import RunError, TaskError
from paceline.files import new_folder, reason
from paceline.hf.folder import CONFIG, ModelFolder, describe_briefly, import_transformers, open_folder
from paceline.hf.lora import Lora, merge
from paceline.hf.task import build_model, set_labels_
from paceline.spec import HF_TASK, Spec

# Files of a folder that say how to use its model: the tokenizer, generation, the template of a chat.
COMPANIONS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def check_out(out: Path) -> None:
    """Raise RunError unless `out` is free, or an empty folder."""
    try:
        is_free = not os.path.lexists(out) or (
            out.is_dir() and not out.is_symlink() and not any(out.iterdir())
        )
    except (OSError, ValueError) as error:
        raise RunError(f"cannot write {out}: {reason(error)}") from error
    if not is_free:
        raise RunError(f"{out} exists already; name another folder")
    if not out.absolute().parent.is_dir():
        raise RunError(f"cannot write {out}: no such folder: {out.parent}; create it first")


@dataclass(frozen=True)
class TrainedModel:
    """The model that a run trained, without its weights."""

    source: ModelFolder
    objective: str | None = None
    labels: tuple[str, ...] | None = None  # of a classifier
    lora: Lora | None = None

    def build(self) -> Any:
        """Return the model on the meta device, without adapters."""
        with torch.device("meta"):
            return build_model(self.source, self.objective, self.labels)

    def merge(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights of the model without adapters that computes the same as that of the run."""
        if self.lora is None:
            return weights
        with torch.device("meta"):
            adapted = build_model(self.source, self.objective, self.labels, self.lora)
        return merge(weights, adapted)

    def read_config(self) -> Any:
        """Return its configuration, without the changes that serve the training only."""
        config = self.source.read_config()
        set_labels_(config, self.labels)
        return config


def find_model(spec: Spec) -> TrainedModel:
    """Return the model that a run trained. Raises RunError and TaskError."""
    if spec.task != HF_TASK:
        raise RunError(
            f"--format hf requires a run of hf:FOLDER, got task {spec.task}; use --format safetensors"
        )
    path, labels = Path(spec.set["folder"]), spec.set.get("labels")
    # The weights of the folder are not needed any more.
    source = open_folder(str(path if path.name == CONFIG else path / CONFIG))
    names = tuple(labels) if labels is not None else None
    lora = spec.set.get("lora")
    return TrainedModel(
        source, spec.set.get("objective"), names, Lora.model_validate_json(json.dumps(lora)) if lora else None
    )


def write_folder(weights: Mapping[str, Tensor], model: TrainedModel, out: Path) -> None:
    """Write config, weights and the files of the tokenizer to the new folder `out`.

    The folder appears at `out` only after transformers loaded it with the same values. The weights keep the
    type of the run. Adapters are merged into them.
    weights: whole tensors by their names in the model. Raises RunError and TaskError.
    """
    weights = model.merge(weights)
    with new_folder(out) as temporary:
        _write(weights, model, temporary)
        _check(weights, type(model.build()), temporary)


def _write(weights: Mapping[str, Tensor], trained: TrainedModel, folder: Path) -> None:
    from transformers.utils import logging

    model, source = trained.build(), trained.source
    names = model.state_dict().keys()
    if missing := sorted(names - weights.keys()):
        raise TaskError(
            f"the checkpoint lacks {missing[0]}, which the model of {source.path} has; "
            "restore the config.json of the run"
        )
    values = {name: weights[name] for name in names}
    try:
        model.load_state_dict(values, assign=True)
    except RuntimeError as error:
        raise TaskError(
            f"the checkpoint does not fit the model of {source.path} ({describe_briefly(error)}); "
            "restore the config.json of the run"
        ) from error
    model.tie_weights()
    model.config = trained.read_config()  # that of the training differs
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    for pattern in COMPANIONS:
        for file in source.path.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def _check(weights: Mapping[str, Tensor], kind: Any, folder: Path) -> None:
    """Raise RunError unless transformers loads a folder with these values."""
    loaded, report = kind.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    problems = [f"{what} {sorted(map(str, names))[0]}" for what, names in report.items() if names]
    problems += [
        f"changes {name}"
        for name, value in loaded.state_dict().items()
        if not torch.equal(value, weights[name])
    ]
    if problems:
        raise RunError(
            f"the exported folder would not give the model of the run: from_pretrained reports "
            f"{problems[0]}; transformers {import_transformers().__version__} may not support this model, "
            "use --format safetensors"
        )
