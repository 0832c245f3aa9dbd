"""Optimizers such as users write: their values are in places for which no part of Paceline was written."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models import Points


class Own(Optimizer):
    """Base class. Each optimizer moves parameters against their gradient."""

    def __init__(self, params: Any, lr: float = 0.02):
        super().__init__(params, {"lr": lr})

    def each(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad, self.state[parameter]


class Numbers(Own):
    """Numbers of all kinds, None and text in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, state in self.each():
            if not state:
                state |= {"step": 0, "scale": 1.0, "is_odd": False, "none": None, "m": torch.zeros_like(grad)}
            state["step"] += 1
            state["scale"] *= 0.9
            state["is_odd"] = not state["is_odd"]
            state["m"].mul_(0.9).add_(grad)
            factor = (1 + state["scale"]) / state["step"] ** 0.5 * (1.5 if state["is_odd"] else 1.0)
            parameter.add_(state["m"], alpha=-group["lr"] * factor)


class Counting(Own):
    """A count in the group, one in an attribute, one in the state of no parameter, and an own option."""

    def __init__(self, params: Any, power: float = 0.5):
        super().__init__(params)
        self.count, self.power = 0, power
        self.state["k"] = torch.tensor([0])  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        k = self.state["k"]  # type: ignore[index]
        k += 1  # type: ignore[misc]
        for group, parameter, grad, _ in self.each():
            total = self.count + group["step"] + k.item()  # type: ignore[attr-defined]
            parameter.add_(grad, alpha=-group["lr"] / total**self.power)


class Options(torch.optim.Adam):
    """A class of torch with other arguments."""

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)


class Listing(Own):
    """Lists of tensors in the state, as Shampoo and SOAP have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, state in self.each():
            past = state.setdefault("past", [[], (grad.clone(),)])
            past[0].append(grad.clone())
            del past[0][:-2]
            for at, other in enumerate([*past[0], *past[1]]):
                parameter.add_(other, alpha=-group["lr"] / (at + 1))


class Lookahead(Optimizer):
    """An optimizer around another, which does not call the constructor of torch's base class."""

    def __init__(self, base: Optimizer):
        self.base, self.count = base, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: Any = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in params:
            self.state[parameter].setdefault("slow", parameter.clone())
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for parameter in params:
                slow = self.state[parameter]["slow"]
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)


class Queueing(Own):
    """A queue in the state, which checkpoints cannot hold."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, state in self.each():
            state.setdefault("queue", deque(maxlen=2)).append(grad.clone())
            parameter.add_(sum(state["queue"]), alpha=-group["lr"])


class Stacking(Own):
    """A tensor in the state with another shape than the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, state in self.each():
            moments = state.setdefault("moments", torch.stack([torch.zeros_like(grad)] * 2))
            moments[0].mul_(0.9).add_(grad)
            moments[1].mul_(0.5).add_(grad)
            parameter.add_(moments[0] + moments[1], alpha=-group["lr"])


class Noisy(Own):
    """Random numbers of torch and Python."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, _ in self.each():
            parameter.add_(grad + torch.randn_like(grad) * random.random(), alpha=-group["lr"])


class Generating(Own):
    """A random generator in an attribute."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, _ in self.each():
            noise = torch.randn(grad.shape, generator=self.generator, dtype=grad.dtype)
            parameter.add_(grad + noise, alpha=-group["lr"])


class Late(Own):
    """The norm of a tensor, from the eighth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, state in self.each():
            state["step"] = state.get("step", 0) + 1
            factor = 1 / (1 + grad.norm()) if state["step"] > 7 else 1.0
            parameter.sub_(grad * factor * group["lr"])


class Large(Own):
    """The mean of a tensor, for matrices with at least 128 rows and columns only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, parameter, grad, _ in self.each():
            is_large = grad.dim() == 2 and min(grad.shape) >= 128
            parameter.sub_(grad / (1 + grad.abs().mean()) * group["lr"] if is_large else grad * group["lr"])


Params = list[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "numbers": Numbers,
    "counting": lambda params: Counting(params, power=0.9),
    "options": lambda params: Options(params, lr=0.05, betas=(0.5, 0.7)),
    "listing": Listing,
    "lookahead": lambda params: Lookahead(torch.optim.AdamW(params, lr=0.02)),
    "queueing": Queueing,
    "stacking": Stacking,
    "noisy": Noisy,
    "generating": Generating,
}


class OwnOptimizer(Points):
    """A task with one of these optimizers."""

    kind: str = "numbers"

    def optimizer(self, params: Any) -> Optimizer:
        return OPTIMIZERS[self.kind]([parameter for _, parameter in params])
