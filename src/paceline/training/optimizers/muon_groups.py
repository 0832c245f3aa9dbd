"""Which parameters Muon trains as matrices, and which by AdamW."""

import fnmatch
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from paceline.errors import SpecError
from paceline.spec import Optimizer
from paceline.training.optimizers.muon import Muon
from paceline.training.optimizers.param_groups import merge_groups, select_names

# Matrices that are queries, keys and values one after the other, in torch, timm, nanoGPT and GPT-2.
FUSED = "*in_proj_weight:3,*qkv.weight:3,*Wqkv.weight:3,*c_attn.weight:3"
EMBEDDING_WORDS = ("emb", "pos_", "position", "token")
MAX_NAMES = 4  # in a note


@dataclass(frozen=True)
class FusedPattern:
    """Matrices that are several matrices: the pattern of their names, and their number."""

    pattern: str
    blocks: int


def build_muon(
    spec: Optimizer,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    own: Mapping[str, dict[str, Any]],
    notes: list[str],
) -> Muon:
    """Return Muon for the parameters of this rank. Raises SpecError for patterns that match nothing.

    own: options of single parameters by name. notes: what AdamW trains is added.
    """
    options = dict(spec.options)
    adamw_lr, patterns, fused = (options.pop(key) for key in ("adamw_lr", "adamw", "fused"))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    excluded = (
        select_names(patterns, model, trained, "optimizer.adamw")
        if patterns is not None
        else find_embeddings_and_head(model) & trained.keys()
    )
    known = _read_fused(fused if fused is not None else FUSED, model, trained, must_match=fused is not None)
    matrices = {*find_matrices(model)} - excluded
    if patterns and not matrices & trained.keys():
        raise SpecError(
            f"optimizer.adamw={patterns!r} leaves no matrix to muon; leave some out, or use --optimizer adamw"
        )
    entries = []
    for name, parameter in params.items():
        is_matrix = name in matrices
        blocks, dim = _find_blocks(name, parameter, known, fused is not None) if is_matrix else (1, 0)
        group: dict[str, Any] = {"matrix": is_matrix, "blocks": blocks, "block_dim": dim}
        if not is_matrix and adamw_lr is not None:
            group["lr"] = adamw_lr
        entries.append((group | own.get(name, {}), parameter))
    entries.sort(key=lambda entry: not entry[0]["matrix"])  # steps show the rate of the first group
    notes += _describe(trained, matrices)
    return Muon(merge_groups(entries), lr=spec.lr, weight_decay=spec.weight_decay, **options)


def find_matrices(model: nn.Module) -> list[str]:
    """Return the names of real matrices and weights of convolutions with more than one row and column.

    Other tensors with more dimensions may be several matrices in any order, such as stacked experts.
    """
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, _ConvNd)}
    return [
        name
        for name, parameter in model.named_parameters()
        if (parameter.dim() == 2 or id(parameter) in convolutions)
        and not parameter.is_complex()
        and min(parameter.shape[0], parameter.shape[1:].numel()) > 1
    ]


def find_embeddings_and_head(model: nn.Module) -> set[str]:
    """Return the names of embeddings, and of the weight of the last layer in the order of the model."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    found = {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in embeddings or any(word in name.lower() for word in EMBEDDING_WORDS)
    }
    others = [name for name in find_matrices(model) if name not in found]
    # A head that is tied to the embedding has its name, so the last layer is hidden.
    has_tied_head = any(
        name not in dict(model.named_parameters()) and id(parameter) in embeddings
        for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    return found | ({others[-1]} if others and not has_tied_head else set())


def _read_fused(text: str, model: nn.Module, names: Collection[str], must_match: bool) -> list[FusedPattern]:
    """Return the patterns of `PATTERN:BLOCKS,…`. Raises SpecError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, blocks = part.rpartition(":")
        if not pattern or not blocks.isdecimal() or int(blocks) < 1:
            raise SpecError(f"optimizer.fused must be PATTERN:NUMBER,…, such as *.qkv.weight:3, got {part!r}")
        if must_match:
            select_names(pattern, model, names, "optimizer.fused")
        found.append(FusedPattern(pattern, int(blocks)))
    return found


def _find_blocks(name: str, parameter: Tensor, known: list[FusedPattern], must_fit: bool) -> tuple[int, int]:
    """Return the number of matrices in a matrix, and the dimension along which they are."""
    for fused in known:
        if not fnmatch.fnmatchcase(name, fused.pattern):
            continue
        for dim in (0, 1):
            # nn.Linear has outputs first; Conv1D of GPT-2 has them last.
            if parameter.shape[dim] == fused.blocks * parameter.shape[1 - dim]:
                return fused.blocks, dim
        if must_fit:
            if parameter.shape[0] % fused.blocks == 0:
                return fused.blocks, 0
            raise SpecError(
                f"optimizer.fused: {name} has {parameter.shape[0]} rows, which are not {fused.blocks} equal "
                "matrices; leave it out"
            )
    return 1, 0


def _describe(trained: Mapping[str, Tensor], matrices: Container[str]) -> list[str]:
    """Return a note on what AdamW trains."""
    others = {name: parameter for name, parameter in trained.items() if name not in matrices}
    names = [name for name, parameter in others.items() if parameter.dim() >= 2]
    vectors, count = len(others) - len(names), len(trained) - len(others)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = f", {', '.join(names[:MAX_NAMES])}{more}" if names else ""
    return [
        f"muon orthogonalizes {count} matri{'ces' if count != 1 else 'x'}; AdamW trains {vectors} "
        f"vector{'s' * (vectors != 1)}{listed} (optimizer.adamw changes it)"
    ]
