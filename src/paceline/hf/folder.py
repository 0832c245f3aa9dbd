"""A folder of a Hugging Face model: config.json, weights in safetensors format and a tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.errors import TaskError
from paceline.hf.weight_files import INDEX, SINGLE, find_weight_files
from paceline.spec import suggest

CONFIG = "config.json"
EXPECTED = f"expected a folder with {CONFIG}, as save_pretrained writes it"
MAX_BYTES = 2**24  # of a JSON file
MAX_TEXT = 300  # characters of an exception that a message shows


def import_transformers() -> Any:
    """Return the module transformers. Raises TaskError if it is not installed or too old."""
    try:
        import transformers
    except ImportError as error:
        raise TaskError(
            f"hf: requires transformers, which cannot be imported ({error}); run: pip install 'paceline[hf]'"
        ) from error
    if int(transformers.__version__.partition(".")[0]) < 5:
        raise TaskError(
            f"hf: requires transformers 5 or newer, got {transformers.__version__}; "
            "run: pip install --upgrade transformers"
        )
    return transformers


@dataclass(frozen=True)
class ModelFolder:
    """A folder of a model that passed all checks that read no tensors and run no code of the model."""

    path: Path
    has_weights: bool  # False: the model starts from random weights
    tree: Mapping[str, Any]  # config.json

    def read_config(self) -> Any:
        """Return a new configuration of transformers. Raises TaskError."""
        transformers = import_transformers()
        try:
            return transformers.AutoConfig.from_pretrained(
                self.path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise TaskError(
                f"transformers cannot read {self.path / CONFIG}: {describe_briefly(error)}"
            ) from error

    @property
    def kind(self) -> str:
        """The type of the model, such as llama."""
        return str(self.tree["model_type"])

    @property
    def architecture(self) -> str:
        """The class of transformers that wrote the folder; empty if the folder does not name it."""
        names = self.tree.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


@lru_cache(maxsize=8)
def open_folder(reference: str) -> ModelFolder:
    """Return the model in a folder, or in the folder of a config.json, which then has random weights.

    Raises TaskError.
    """
    path = Path(reference)
    has_weights = path.name != CONFIG
    folder = path if has_weights else path.parent
    if not path.exists():
        raise TaskError(f"no such {'folder' if has_weights else 'file'}: {path}; {EXPECTED}")
    if not folder.is_dir() or not (folder / CONFIG).is_file():
        what = f"has no {CONFIG}" if folder.is_dir() else "is a file"
        raise TaskError(f"{folder} is not a Hugging Face model: it {what}; {EXPECTED}")
    tree = _read_json(folder / CONFIG)
    _check_config(folder, tree)
    if has_weights:
        _check_weights(folder)
    return ModelFolder(folder, has_weights, tree)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            tree = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"cannot read {path}: {error}; it must be JSON") from error
    if not isinstance(tree, dict):
        raise TaskError(f"cannot read {path}: it must contain an object, got {type(tree).__name__}")
    return tree


def _check_config(folder: Path, tree: Mapping[str, Any]) -> None:
    """Raise TaskError for a model that transformers lacks, needs code of the folder, or is quantized."""
    import_transformers()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = tree.get("model_type")
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING_NAMES
    if tree.get("auto_map"):
        hint = (
            f"transformers has model_type {kind!r} itself: delete auto_map to use that"
            if is_known
            else "use a model that transformers has"
        )
        raise TaskError(
            f"{folder / CONFIG} has auto_map: the model needs code of its folder, which Paceline never runs; "
            f"{hint}"
        )
    if not isinstance(kind, str):
        raise TaskError(f"{folder / CONFIG} has no model_type; {EXPECTED}")
    if not is_known:
        raise TaskError(
            f"{folder / CONFIG}: transformers has no model_type {kind!r}{suggest(kind, CONFIG_MAPPING_NAMES)}"
        )
    if tree.get("quantization_config"):
        raise TaskError(
            f"{folder / CONFIG} has quantization_config: quantized weights cannot be trained; "
            "use the weights before quantization"
        )


def _check_weights(folder: Path) -> None:
    if not any((folder / name).is_file() for name in (INDEX, SINGLE)):
        other = [path.name for path in sorted(folder.glob("pytorch_model*.bin"))]
        found = f", only {other[0]}, whose reading could run code" if other else ""
        fix = "save the model with transformers again" if other else "download it again"
        raise TaskError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX}{found}; {fix}, "
            f"or start from random weights with hf:{folder / CONFIG}"
        )
    find_weight_files(folder)


@lru_cache(maxsize=4)
def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder. Raises TaskError."""
    transformers = import_transformers()
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and _read_json(settings).get("auto_map"):
        raise TaskError(
            f"{settings} has auto_map: the tokenizer needs code of its folder, which Paceline never runs; "
            "use a tokenizer that transformers has"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise TaskError(
            f"transformers cannot load the tokenizer of {folder}: {describe_briefly(error)}; copy the files "
            "of the tokenizer there, such as tokenizer.json"
        ) from error


def check_vocabulary(folder: Path, tokenizer: Any, vocabulary: int) -> None:
    """Raise TaskError if the tokenizer has tokens that the model lacks.

    vocabulary: rows of the model's embedding. A model may have more, which pad it to a round number.
    """
    if len(tokenizer) > vocabulary:
        raise TaskError(
            f"the tokenizer of {folder} has {len(tokenizer):,} tokens, but the model has {vocabulary:,} "
            f"(vocab_size in {CONFIG}); use the tokenizer that belongs to the model"
        )


def describe_briefly(error: Exception) -> str:
    """Return the type and the text of an exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_TEXT].rstrip(".")
