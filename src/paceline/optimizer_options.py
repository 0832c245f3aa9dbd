"""The optimizers by name, as a table: the options of each and their defaults."""

from collections.abc import Mapping
from typing import Any

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}

# Name -> options and their defaults, besides lr, weight_decay and clip. Those of optimizers of torch are
# torch's, except that sgd has momentum. All of these compute the same update under every plan.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {**ADAM, "amsgrad": False},
    "sgd": {"momentum": 0.9, "nesterov": False, "dampening": 0.0},
    "adam": {**ADAM, "amsgrad": False},
    "adamax": ADAM,
    "nadam": {**ADAM, "momentum_decay": 0.004, "decoupled_weight_decay": False},
    "radam": {**ADAM, "decoupled_weight_decay": False},
    "adagrad": {"eps": 1e-10, "lr_decay": 0.0, "initial_accumulator_value": 0.0},
    "adadelta": {"eps": 1e-6, "rho": 0.9},
    "rmsprop": {"eps": 1e-8, "alpha": 0.99, "momentum": 0.0, "centered": False},
    "rprop": {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    "asgd": {"alpha": 0.75, "lambd": 1e-4, "t0": 1e6},
    "lion": {"betas": (0.9, 0.99)},
    "lars": {
        "momentum": 0.9,
        "nesterov": False,
        "eps": 1e-8,
        "trust_coefficient": 0.001,
        "trust_clip": None,
        "convention": "you2017",
    },
    "lamb": {
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "bias_correction": True,
        "trust_clip": None,
        "convention": "you2020",
    },
    "novograd": {"betas": (0.95, 0.98), "eps": 1e-8, "grad_averaging": False},
    "adafactor": {
        "beta2_decay": -0.8,
        "eps2": 1e-3,
        "clip_threshold": 1.0,
        "scale_parameter": True,
        "relative_step": True,
    },
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_precision": "bf16",
        "adjust_lr": "original",
        **ADAM,
        "adamw": None,
        "adamw_lr": None,
        "fused": None,
    },
}
WITHOUT_DECAY = frozenset({"rprop"})  # optimizers that have no weight decay
WITH_TRUST = ("lars", "lamb")  # optimizers that scale the update of each tensor
# Optimizers whose weight decay is not a part of the gradient.
DECOUPLED = frozenset({"adamw", "lion", "lamb", "adafactor", "muon"})
# Where implementations differ from the paper, the option `convention` names whose update is computed.
CONVENTIONS = {"lars": ("you2017", "timm"), "lamb": ("you2020", "timm")}

# Elements of state per weight with the default options. Rows and columns of adafactor, and numbers for a
# whole tensor, are few and not counted.
MOMENTS: Mapping[str, int] = {
    **dict.fromkeys(("adamw", "adam", "adamax", "nadam", "radam", "adadelta", "rprop", "lamb"), 2),
    **dict.fromkeys(("sgd", "adagrad", "rmsprop", "asgd", "lion", "lars", "novograd", "muon"), 1),
    "adafactor": 0,
}


def count_moments(name: str, options: Mapping[str, Any]) -> int:
    """Return the elements of state per weight of an optimizer with these options."""
    count = MOMENTS[name] + bool(options.get("amsgrad"))
    if name in ("sgd", "lars") and not options.get("momentum"):
        return 0
    if name == "rmsprop":
        count += bool(options.get("momentum")) + bool(options.get("centered"))
    return count
