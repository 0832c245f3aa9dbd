"""Models by name, and from TOML files."""

import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.errors import SpecError
from paceline.plan.model.convnets import efficientnet, resnet
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.transformer import Transformer
from paceline.spec import describe_error, list_keys, read_toml, suggest

CONVNETS: Mapping[str, Callable[[str], ModelFacts]] = {
    "resnet50": lambda name: resnet(name, (3, 4, 6, 3)),
    "resnet101": lambda name: resnet(name, (3, 4, 23, 3)),
    "resnet152": lambda name: resnet(name, (3, 8, 36, 3)),
    "efficientnet-b0": lambda name: efficientnet(name),
    "efficientnet-b4": lambda name: efficientnet(name, 1.4, 1.8, 380),
    "efficientnet-b7": lambda name: efficientnet(name, 2.0, 3.1, 600),
}
# Other names of the same numbers.
RELEASES = {
    **{f"llama3.{release}-{size}": f"llama3-{size}" for release in "13" for size in ("8b", "70b", "405b")},
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    "llama-30b": "llama-33b",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-r1": "deepseek-v3",
    "glm-4.6": "glm-4.5",
    "bloom": "bloom-176b",
    "mt-nlg": "mt-nlg-530b",
    "kimi-k2.5": "kimi-k2",
    "nemotron-8b": "nemotron3-8b",
    "nemotron-15b": "nemotron4-15b",
    "nemotron-340b": "nemotron4-340b",
}
ALIASES = {
    "gpt3": "gpt3-175b",
    "gpt2-small": "gpt2",
    "vit-b": "vit-b16",
    "vit-l": "vit-l16",
    "bert": "bert-base",
    "resnet-50": "resnet50",
    **RELEASES,
}


@cache
def _transformers() -> Mapping[str, Mapping[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, row in tomllib.loads((files("paceline.plan") / "models.toml").read_text("utf-8")).items():
        rows[name] = (
            rows.get(row.get("like", ""), {})
            | {key: value for key, value in row.items() if key != "like"}
            | {"name": name}
        )
    return rows


def list_models() -> tuple[str, ...]:
    """Return the names of all known models."""
    return (*_transformers(), *CONVNETS)


def list_transformers() -> tuple[str, ...]:
    """Return the names of the known models that are described by the numbers of a transformer."""
    return tuple(_transformers())


def load_transformer(name: str, **changes: Any) -> Transformer:
    """Return a known transformer with some of its numbers changed.

    Raises SpecError for an unknown name or key.
    """
    name = ALIASES.get(name.lower(), name.lower())
    if name not in _transformers():
        raise SpecError(f"there is no transformer {name}{suggest(name, _transformers())}")
    return _validate_transformer({**_transformers()[name], **changes})


def load_model(name: str, **changes: Any) -> ModelFacts:
    """Return a known model, or one from a TOML file with the numbers of a transformer.

    In the file, `like` names a known transformer to start from. `changes`, such as `seq`, apply to
    transformers only. Raises SpecError.
    """
    if name.endswith(".toml"):
        return _validate_transformer(_read_toml(Path(name)) | changes).facts()
    known = ALIASES.get(name.lower(), name.lower())
    if known in CONVNETS:
        if changes:
            raise SpecError(f"{known} is not a transformer and has no {', '.join(changes)}; leave it out")
        return CONVNETS[known](known)
    if known not in _transformers():
        raise SpecError(
            f"there is no model {name}, and a file with its layers, hidden … must end in "
            f".toml{suggest(known, list_models())}"
        )
    return load_transformer(known, **changes).facts()


def _read_toml(path: Path) -> dict[str, Any]:
    tree = read_toml(path)
    like = tree.pop("like", None)
    if like is not None and like not in _transformers():
        raise SpecError(f"{path}: there is no model {like!r} for like{suggest(str(like), _transformers())}")
    return {**(_transformers()[like] if like else {}), "name": path.stem, **tree}


def _validate_transformer(tree: Mapping[str, Any]) -> Transformer:
    try:
        return Transformer.model_validate(tree)
    except ValidationError as error:
        missing = [str(found["loc"][0]) for found in error.errors() if found["type"] == "missing"]
        if missing:
            raise SpecError(
                f"model {tree.get('name', '')} lacks {', '.join(missing)}; add them, or start from a known "
                f"model with like"
            ) from error
        raise SpecError(
            f"model {tree.get('name', '')}: {describe_error(error, list_keys(Transformer))}"
        ) from error
