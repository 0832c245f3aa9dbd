"""The task hf:FOLDER: a Hugging Face model, trained on text files or JSON lines."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.ragged import Ragged
from paceline.errors import DataError, TaskError
from paceline.hf.experts import (
    NAME,
    ExpertBalance,
    balance,
    find_balance,
    sum_router_outputs,
)
from paceline.hf.folder import ModelFolder, check_vocabulary, import_transformers, load_tokenizer, open_folder
from paceline.hf.lora import Lora, add_adapters_
from paceline.hf.objectives import CAUSAL_LM, CLASSIFICATION, MASKED_LM, SEQ2SEQ, Objective, choose_objective
from paceline.hf.samples import (
    IGNORED,
    BatchedTokenWindows,
    LabelledTexts,
    MaskedWindows,
    TextPairs,
    Texts,
    TokenWindows,
    find_padding,
    read_lines,
    read_tokens,
)
from paceline.hf.weights import FolderWeights
from paceline.task import MapDataset, Task
from paceline.torch_compat import multiply_experts_of_all_dtypes

MAX_DEFAULT_LENGTH = 1024  # tokens of a sample


class HuggingFace(Task):
    """The model of a Hugging Face folder, with its weights and its tokenizer. Runs no code of the folder."""

    folder: str  # of the model, or its config.json to start from random weights
    data: str  # text file, or JSON lines, to train on
    validation: str | None = None  # file to evaluate on
    # by default, that of the folder's architecture
    objective: Literal["causal-lm", "masked-lm", "seq2seq", "classification"] | None = None
    length: int | None = None  # tokens of a sample; by default 1,024, or the positions of the model if fewer
    text: str = "text"  # key of the text in JSON lines
    target: str = "target"  # key of the text to write, for seq2seq
    label: str = "label"  # key of the class, for classification
    labels: tuple[str, ...] | None = None  # names of the classes; by default, those of the config
    masked: float = 0.15  # share of the tokens that masked-lm predicts
    router_aux_loss_coef: float | None = None  # of the loss that balances experts; by default, see the docs
    lora: Lora | None = None  # train adapters, and freeze the model: --set lora.rank=16

    def __post_init__(self) -> None:
        folder = open_folder(self.folder)
        choose_objective(self.objective, folder)
        if self.length is not None and self.length < 1:
            raise TaskError(f"length must be at least 1 token, got {self.length}")
        if not 0 < self.masked <= 1:
            raise TaskError(f"masked must be above 0 and at most 1, got {self.masked}")
        if self.router_aux_loss_coef is not None and not 0 <= self.router_aux_loss_coef < math.inf:
            raise TaskError(f"router_aux_loss_coef must be 0 or above, got {self.router_aux_loss_coef}")
        self._find_balance()
        for file in (self.data, self.validation):
            if file is not None and not Path(file).is_file():
                raise DataError(f"no such data file: {file}; specify a text file or JSON lines")

    def model(self) -> nn.Module:
        return build_model(
            open_folder(self.folder),
            self.objective,
            self.labels,
            self.lora,
            balances=self._has_auxiliary_loss(),
        )

    def pretrained(self) -> FolderWeights | None:
        folder = open_folder(self.folder)
        return FolderWeights(folder.path) if folder.has_weights else None

    @property
    def tokens_per_sample(self) -> int | None:
        """Number of tokens of a sample, for schedules; None if samples have different numbers."""
        folder = open_folder(self.folder)
        if _find_objective(self.folder, self.objective) not in (CAUSAL_LM, MASKED_LM):
            return None
        config = folder.read_config().get_text_config()
        return _choose_length(self.length, getattr(config, "max_position_embeddings", None))

    def dataset(self, split: str) -> MapDataset | None:
        name = {"train": self.data, "validation": self.validation}.get(split)
        if name is None:
            return None
        file, folder = Path(name), open_folder(self.folder)
        whole, objective = folder.read_config(), choose_objective(self.objective, folder)
        config = whole.get_text_config()
        tokenizer = load_tokenizer(folder.path)
        check_vocabulary(folder.path, tokenizer, config.vocab_size)
        limit = _choose_length(self.length, getattr(config, "max_position_embeddings", None))
        if objective is SEQ2SEQ:
            return TextPairs(folder.path, file, (self.text, self.target), limit, find_start(folder, whole))
        if objective is CLASSIFICATION:
            names = self.labels or _read_labels(whole)
            return LabelledTexts(folder.path, file, (self.text, self.label), limit, names)
        tokens = read_tokens(folder.path, file, self.text)
        has_own_collate = type(self).collate is not HuggingFace.collate  # of a subclass, which must be called
        windows: TokenWindows | MaskedWindows = (TokenWindows if has_own_collate else BatchedTokenWindows)(
            tokens, limit
        )
        if objective is MASKED_LM:
            windows = MaskedWindows(tokens, limit, self.masked, tokenizer)
        if not len(windows):
            needed = limit + (objective is CAUSAL_LM)
            shorter = f" or --set length={(len(tokens) - 1) // 2}" if len(tokens) > 2 else ""
            raise DataError(
                f"{file} has {len(tokens):,} tokens, but a sample takes {needed:,}; use more text{shorter}"
            )
        return windows

    def read_files(self, files: Sequence[Path]) -> MapDataset:
        """Return the texts of text files (one in each line) or JSON lines, for a classifier."""
        folder = open_folder(self.folder)
        if self._objective is not CLASSIFICATION:
            raise TaskError(
                f"a {self._objective.what} predicts no files; use --split, or paceline generate for texts"
            )
        limit = _choose_length(
            self.length, getattr(folder.read_config().get_text_config(), "max_position_embeddings", None)
        )
        return Texts(folder.path, [text for file in files for text in read_lines(file, self.text)], limit)

    def predict(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the class of each text and the probabilities of all.

        Of other models, return the most likely token at each position that has a label.
        """
        if self._objective is not CLASSIFICATION:
            best, has_label = output.logits.argmax(-1), batch["labels"] != IGNORED
            return {"tokens": [row[chosen].tolist() for row, chosen in zip(best, has_label, strict=True)]}
        names = self.labels or _read_labels(open_folder(self.folder).read_config())
        return {
            "label": [names[number] for number in output.logits.argmax(-1).tolist()],
            "scores": [
                dict(zip(names, row, strict=True)) for row in output.logits.double().softmax(-1).tolist()
            ],
        }

    def collate(self, samples: list[dict[str, Tensor]]) -> Any:
        if not self._objective.is_padded:
            return super().collate(samples)
        padding = find_padding(open_folder(self.folder).path)
        values = {"labels": IGNORED, "attention_mask": 0}
        if "labels" in samples[0] and not samples[0]["labels"].dim():  # classes, which are not padded
            classes = torch.stack([sample["labels"] for sample in samples])
            samples = [{key: value for key, value in sample.items() if key != "labels"} for sample in samples]
            return {**self._pad(samples, values, padding), "labels": classes}
        return self._pad(samples, values, padding)

    def _pad(
        self, samples: list[dict[str, Tensor]], values: Mapping[str, int], padding: int
    ) -> dict[str, Any]:
        """Return each tensor padded to `length`, or to the longest of the global batch without it."""
        return {
            key: Ragged([sample[key] for sample in samples], values.get(key, padding), self.length or 1)
            for key in samples[0]
        }

    @property
    def _objective(self) -> Objective:
        return _find_objective(self.folder, self.objective)

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: value for key, value in batch.items() if key != "labels"}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of each token, or of each text for classification."""
        logits, labels = output.logits, batch["labels"]
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )

    def weights(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return 1 for each token that has a label, 0 for padding and tokens that are not predicted.

        None if all tokens have labels. A subclass with samples of its own may label fewer.
        """
        own = type(self)
        has_own_samples = (own.dataset, own.collate) == (HuggingFace.dataset, HuggingFace.collate)
        if self._objective.labels_all and has_own_samples:
            return None
        return (batch["labels"].flatten() != IGNORED).float()

    def _find_balance(self) -> ExpertBalance | None:
        return find_balance(self.folder, self.objective, self.router_aux_loss_coef)

    def _has_auxiliary_loss(self) -> bool:
        return self._find_balance() is not None

    def loss_weights(self) -> dict[str, float]:
        found = self._find_balance()
        return {NAME: found.weight} if found is not None else {}

    def batch_sums(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._find_balance()
        assert found is not None
        return sum_router_outputs(output, batch, found.top_k)

    def auxiliary_loss(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss that balances the experts."""
        return {NAME: balance(sums)}

    def metrics(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (output.logits.argmax(-1) == batch["labels"]).flatten()}


@lru_cache(maxsize=8)
def _find_objective(folder: str, name: str | None) -> Objective:
    """Return the objective of a task, which each step asks for."""
    return choose_objective(name, open_folder(folder))


def import_model_library(reference: str) -> None:
    """Import what the model of a folder needs, and load its tokenizer, for forks of this process.

    reference: as of the task. Starts no threads. Raises TaskError.
    """
    folder = open_folder(reference)
    folder.read_config()
    objective = choose_objective(None, folder)  # all classes of a model are in one module
    getattr(import_transformers(), objective.classes()[folder.kind])  # imports that module
    load_tokenizer(folder.path)


def build_model(
    folder: ModelFolder,
    objective: str | None,
    labels: tuple[str, ...] | None = None,
    lora: Lora | None = None,
    balances: bool = False,
) -> nn.Module:
    """Return the model of a folder for an objective, with random weights.

    labels: names of the classes of a classifier; None: those of the folder. balances: whether the model
    returns the router logits of its experts. Raises TaskError.
    """
    row = choose_objective(objective, folder)
    config = folder.read_config()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values serves generation only
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = balances
    if row is CLASSIFICATION:
        set_labels_(config, labels)
        if config.pad_token_id is None:  # where a text ends, for models that read its last token
            config.pad_token_id = find_padding(folder.path)
    # Weights stay float32 under every precision; the config may name another type.
    model: Any = getattr(import_transformers(), row.auto_class).from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )
    multiply_experts_of_all_dtypes()  # again: the first such model imports the operation that this replaces
    if not row.is_padded:
        # The token for padding may be the one that ends a text. Some models look for it among the values of
        # the tokens, which a forward pass on the meta device lacks.
        model.config.pad_token_id = None
    if lora is not None:
        base = model.base_model_prefix
        # A new classifier learns nothing while it is frozen.
        heads = tuple(name for name, _ in model.named_children() if row is CLASSIFICATION and name != base)
        add_adapters_(model, lora, heads)
    built: nn.Module = model
    return built


def set_labels_(config: Any, labels: tuple[str, ...] | None) -> None:
    """Give a configuration these classes; None: it keeps its own."""
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: number for number, name in enumerate(labels)}


def _read_labels(config: Any) -> tuple[str, ...]:
    return tuple(config.id2label[number] for number in sorted(config.id2label))


def find_start(folder: ModelFolder, config: Any) -> int:
    """Return the token with which a decoder starts. Raises TaskError."""
    start = getattr(config, "decoder_start_token_id", None)
    if not isinstance(start, int):
        raise TaskError(
            f"{folder.path / 'config.json'} has no decoder_start_token_id, with which a target begins; add it"
        )
    return start


def _choose_length(length: int | None, positions: Any) -> int:
    """Return the most tokens of a sample. positions: of the model; not an integer if it has no limit."""
    limit = positions if isinstance(positions, int) and positions > 0 else None
    if length is None:
        return min(MAX_DEFAULT_LENGTH, limit or MAX_DEFAULT_LENGTH)
    if limit is not None and length > limit:
        raise TaskError(
            f"length={length:,} exceeds the {limit:,} positions of the model; use --set length={limit}"
        )
    return length
