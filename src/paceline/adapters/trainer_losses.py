"""The losses of models of transformers by item, by the name that transformers gives them (`loss_type`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a token that has none


@dataclass(frozen=True)
class Loss:
    """A loss by item.

    compute: returns it from logits and labels.
    is_by_token: whether items are tokens, of which some have no label; otherwise they are samples.
    is_shifted: whether a token predicts the label after it.
    """

    compute: Callable[[Tensor, Tensor], Tensor]
    is_by_token: bool = True
    is_shifted: bool = False

    def find_targets(self, labels: Tensor) -> Tensor:
        """Return the label that each token predicts, in one dim."""
        return (_shift(labels) if self.is_shifted else labels).flatten()


def _shift(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _by_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )


def _by_next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return _by_token(logits, _shift(labels))


def _by_sample(logits: Tensor, labels: Tensor) -> Tensor:
    """Return squared errors, cross entropies of classes, or the mean over labels that may occur together.

    As in transformers, the number and the type of the labels decide.
    """
    if logits.shape[-1] == 1:
        return (logits.squeeze(-1) - labels.view(-1)).square()
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=-1)
    return F.cross_entropy(logits, labels.view(-1), reduction="none")


LOSSES = {
    "ForCausalLM": Loss(_by_next_token, is_shifted=True),
    "ForMaskedLM": Loss(_by_token),
    "ForTokenClassification": Loss(_by_token),
    "ForSequenceClassification": Loss(_by_sample, is_by_token=False),
    "ForImageClassification": Loss(_by_sample, is_by_token=False),
}
