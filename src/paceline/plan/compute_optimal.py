"""Which model and how many tokens give the lowest loss for a number of FLOPs.

L(N, D) = E + A / N^α + B / D^β (Hoffmann et al. 2022, arXiv 2203.15556, approach 3), with the constants that
Besiroglu et al. 2024 (arXiv 2404.10102) found when they fitted the same trainings again.
"""

from typing import NamedTuple

IRREDUCIBLE, PARAMS_FACTOR, TOKENS_FACTOR = 1.8172, 482.01, 2085.43
PARAMS_POWER, TOKENS_POWER = 0.3478, 0.3658


class ModelAndTokens(NamedTuple):
    """A training of a dense language model. loss: predicted, in nats per token."""

    params: float
    tokens: float
    loss: float


def predict_loss(params: float, tokens: float) -> float:
    """Return the loss of a dense transformer in nats per token of Hoffmann's text."""
    return IRREDUCIBLE + PARAMS_FACTOR / params**PARAMS_POWER + TOKENS_FACTOR / tokens**TOKENS_POWER


def allocate(flops: float) -> ModelAndTokens:
    """Return the training with the lowest loss for so many FLOPs, 6 for each parameter and token."""
    powers = PARAMS_POWER + TOKENS_POWER
    balance = (PARAMS_POWER * PARAMS_FACTOR / (TOKENS_POWER * TOKENS_FACTOR)) ** (1 / powers)
    params = balance * (flops / 6) ** (TOKENS_POWER / powers)
    tokens = flops / 6 / params
    return ModelAndTokens(params, tokens, predict_loss(params, tokens))


def describe_allocation(params: float, tokens: float) -> str:
    """Return a sentence that compares a training with the best one of the same FLOPs."""
    best = allocate(6 * params * tokens)
    return (
        f"compute-optimal (Hoffmann et al.): {tokens / params:.3g} tokens per parameter give a loss of "
        f"{predict_loss(params, tokens):.3f} nats per token; the same FLOPs would give {best.loss:.3f} with "
        f"{best.params:.3g} parameters and {best.tokens:.3g} tokens, {best.tokens / best.params:.3g} per "
        f"parameter; a smaller model with more tokens costs less to use afterwards"
    )
