"""The task hf:FOLDER: a Hugging Face model, trained on text files or JSON lines."""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import DataError, TaskError
from paceline.hf.folder import ModelFolder, check_vocabulary, import_transformers, load_tokenizer, open_folder
from paceline.hf.samples import TokenWindows, read_tokens
from paceline.hf.weights import FolderWeights
from paceline.task import Task

MAX_DEFAULT_LENGTH = 1024  # tokens of a sample
CAUSAL_LM = "causal-lm"


class HuggingFace(Task):
    """The model of a Hugging Face folder, with its weights and its tokenizer. Runs no code of the folder."""

    folder: str  # of the model, or its config.json to start from random weights
    data: str  # text file, or JSON lines, to train on
    validation: str | None = None  # file to evaluate on
    text: str = "text"  # key of the text in JSON lines
    objective: Literal["causal-lm"] | None = None  # by default, by the architecture of the folder
    length: int | None = None  # tokens of a sample; by default 1,024, or the positions of the model if fewer

    def __post_init__(self) -> None:
        folder = open_folder(self.folder)
        _choose_objective(self.objective, folder)
        if self.length is not None and self.length < 1:
            raise TaskError(f"length must be at least 1 token, got {self.length}")
        for file in (self.data, self.validation):
            if file is not None and not Path(file).is_file():
                raise DataError(f"no such data file: {file}; specify a text file or JSON lines")

    def model(self) -> nn.Module:
        return build_model(open_folder(self.folder), self.objective)

    def pretrained(self) -> FolderWeights | None:
        folder = open_folder(self.folder)
        return FolderWeights(folder.path) if folder.has_weights else None

    def dataset(self, split: str) -> TokenWindows | None:
        file = {"train": self.data, "validation": self.validation}.get(split)
        if file is None:
            return None
        folder = open_folder(self.folder)
        config = folder.read_config().get_text_config()
        check_vocabulary(folder.path, load_tokenizer(folder.path), config.vocab_size)
        tokens = read_tokens(folder.path, Path(file), self.text)
        length = _choose_length(self.length, getattr(config, "max_position_embeddings", None))
        windows = TokenWindows(tokens, length)
        if not len(windows):
            shorter = f" or --set length={(len(tokens) - 1) // 2}" if len(tokens) > 2 else ""
            raise DataError(
                f"{file} has {len(tokens):,} tokens, but a sample takes {length + 1:,}; use more text"
                f"{shorter}"
            )
        return windows

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input_ids": batch["input_ids"]}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of each token."""
        return F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.logits.argmax(-1) == batch["labels"]}


def build_model(folder: ModelFolder, objective: str | None) -> nn.Module:
    """Return the model of a folder for an objective, with random weights. Raises TaskError."""
    _choose_objective(objective, folder)
    config = folder.read_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values serves generation only
    # Weights stay float32 under every precision; the config may name another type.
    model: Any = import_transformers().AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )
    # Samples have no padding, and the token for it may be the one that ends a text. Some models look for it
    # among the values of the tokens, which a forward pass on the meta device lacks.
    model.config.pad_token_id = None
    built: nn.Module = model
    return built


def _choose_objective(objective: str | None, folder: ModelFolder) -> str:
    """Return the objective of a training: the requested one, or that of the folder's architecture.

    Raises TaskError if the model does not have it.
    """
    import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = folder.tree["model_type"]
    if objective is None and folder.architecture not in CLASSES.values():
        named = f"is {folder.architecture}" if folder.architecture else "is not named"
        raise TaskError(
            f"the architecture of {folder.path} {named}, which is no causal language model; "
            f"name the objective with --set objective={CAUSAL_LM} if the model has it"
        )
    if kind not in CLASSES:
        raise TaskError(
            f"transformers has no causal language model of model_type {kind!r}, that of {folder.path}; "
            "use another model"
        )
    return CAUSAL_LM


def _choose_length(length: int | None, positions: Any) -> int:
    """Return the tokens of a sample. positions: of the model; not an integer if it has no limit."""
    limit = positions if isinstance(positions, int) and positions > 0 else None
    if length is None:
        return min(MAX_DEFAULT_LENGTH, limit or MAX_DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise TaskError(
            f"length={length:,} exceeds the {limit:,} positions of the model; use --set length={limit}"
        )
    return length
