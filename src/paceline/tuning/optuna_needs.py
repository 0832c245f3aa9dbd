"""What the samplers of Optuna need, checked before a study starts."""

import importlib.util

from paceline.errors import SpecError

# The modules that each sampler needs.
NEEDS = {"tpe": ("optuna",), "gp": ("optuna", "scipy"), "cma-es": ("optuna", "cmaes"), "nsga2": ("optuna",)}
# They keep generations, and so must see all suggestions again in their order.
REPLAYED = {"cma-es", "nsga2"}


def check_sampler(name: str, num_objectives: int) -> None:
    """Raise SpecError if a sampler of Optuna lacks a module, or cannot search several objectives."""
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            raise SpecError(
                f'--sampler {name} requires {module}, which is not installed; pip install "paceline[tune]", '
                "or use --sampler quasi-random"
            )
    if name == "cma-es" and num_objectives > 1:
        raise SpecError(f"--sampler cma-es searches one objective, got {num_objectives}; use tpe or nsga2")
