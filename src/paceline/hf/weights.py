"""The weights of a folder as tensors of a model: releases of transformers name them differently."""

from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.errors import TaskError
from paceline.hf.lora import find_adapters
from paceline.task import PretrainedTensor


@dataclass
class _Sources:
    """The tensors of the files from which one operation of transformers makes tensors of the model."""

    converter: Any
    keys: list[tuple[str, str]] = field(default_factory=list)  # name in the files, pattern that matched it


@dataclass(frozen=True)
class FolderWeights:
    """The pretrained weights of a folder, as `Task.pretrained` may return them.

    The names are matched by the rules of transformers: it renames tensors of older releases, adds or removes
    the prefix of the base model, and combines tensors, such as those of experts.
    """

    path: Path

    def match(self, model: nn.Module, keys: Collection[str]) -> dict[str, PretrainedTensor]:
        """Return the tensors of the model that the files have, by name.

        Raises TaskError if there are none.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        pretrained: Any = model  # a PreTrainedModel
        own = model.state_dict()
        transforms = get_model_conversion_mapping(pretrained)
        renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        prefix = pretrained.base_model_prefix
        found: dict[str, PretrainedTensor] = {}
        converted: dict[str, _Sources] = {}
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, own)
            if name not in own and key in own:
                name, pattern = key, None
            if name not in own:
                continue
            if pattern is None:
                found.setdefault(name, PretrainedTensor((key,)))
            else:
                sources = converted.setdefault(name, _Sources(by_pattern[pattern]))
                sources.keys.append((key, pattern))
        for name, sources in converted.items():
            found |= _convert(name, sources, model, own)
        if not found:
            raise TaskError(
                f"the weights of {self.path} are those of another model: none of its {len(keys)} tensors "
                f"belongs to {type(model).__name__}; use the config.json that was saved with them"
            )
        return found

    def find_added(self, model: nn.Module) -> Collection[str]:
        """Return the names of the adapters, which start with random numbers and 0."""
        return find_adapters(model)


def _convert(name: str, sources: _Sources, model: Any, own: Collection[str]) -> dict[str, PretrainedTensor]:
    """Return the tensors of the model that one operation makes."""
    keys = tuple(key for key, _ in sources.keys)
    config = model.config

    def run(values: list[Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(sources.converter)
        for (key, pattern), value in zip(sources.keys, values, strict=True):
            converter.add_tensor(name, key, pattern, value)
        made = converter.convert(name, model=None, config=config)
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def select(target: str) -> Callable[[list[Tensor]], Tensor]:
        return lambda values: run(values)[target]

    targets = [
        name.replace(sources.converter.target_patterns[0], pattern)
        for pattern in sources.converter.target_patterns
    ]
    return {target: PretrainedTensor(keys, select(target)) for target in targets if target in own}
