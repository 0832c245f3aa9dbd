"""The losses of models of transformers by item, by the name that transformers gives them (`loss_type`)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from paceline.errors import TaskError

IGNORED = -100  # label of a token that has none


@dataclass(frozen=True)
class Loss:
    """A loss by item.

    compute: returns it from logits, labels and the label smoothing.
    is_by_token: whether items are tokens, of which some have no label; otherwise they are samples.
    is_shifted: whether a token predicts the label after it.
    """

    compute: Callable[[Tensor, Tensor, float], Tensor]
    is_by_token: bool = True
    is_shifted: bool = False

    def find_targets(self, labels: Tensor) -> Tensor:
        """Return the label that each token predicts, in one dim."""
        return (_shift(labels) if self.is_shifted else labels).flatten()


def _shift(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _by_token(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.float().flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )


def _by_next_token(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return _by_token(logits, _shift(labels), smoothing)


def _by_class(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels.view(-1), reduction="none", label_smoothing=smoothing)


def _by_label(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the mean over labels that may occur together."""
    _refuse_smoothing(smoothing, "several labels")
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=-1)


def _by_number(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the mean of squared errors over the numbers of a sample."""
    _refuse_smoothing(smoothing, "numbers")
    return (logits - labels.view_as(logits)).square().flatten(1).mean(dim=1)


def _refuse_smoothing(smoothing: float, labels: str) -> None:
    if smoothing:
        raise TaskError(
            f"label_smoothing_factor={smoothing:g} requires a class for each sample, got {labels}; set it "
            "to 0"
        )


def _by_sample(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the loss that the number and the type of the labels decide, as in transformers."""
    if logits.shape[-1] == 1:
        return _by_number(logits, labels, smoothing)
    return (_by_label if labels.is_floating_point() else _by_class)(logits, labels, smoothing)


# By `problem_type` of the configuration.
SAMPLE_LOSSES = {
    None: Loss(_by_sample, is_by_token=False),
    "regression": Loss(_by_number, is_by_token=False),
    "single_label_classification": Loss(_by_class, is_by_token=False),
    "multi_label_classification": Loss(_by_label, is_by_token=False),
}
# By `loss_type` of the model.
LOSSES = {
    "ForCausalLM": Loss(_by_next_token, is_shifted=True),
    "ForMaskedLM": Loss(_by_token),
    "ForTokenClassification": Loss(_by_token),
    "ForSequenceClassification": SAMPLE_LOSSES[None],
    "ForImageClassification": SAMPLE_LOSSES[None],
}
