"""What one server keeps: a share of the weights and of the optimizer's state, and gradients until all of a step have come."""

import inspect
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from paceline.training.parameter_server.partition import ParameterSlice, cut_state
from paceline.training.parameter_server.rpc import Message, answered

Gradients = Mapping[ParameterSlice, Tensor]


@dataclass
class Shard:
    """Calls come from threads of the transport; none of them waits.

    push    keep a worker's gradients of a step
    pull    the weights, as soon as they have `need` updates; none of them when they have not more than `have`
    sum     add up the gradients of a step: the mean over all items; answers with the square of its norm
    update  make the update, with this factor on the gradient and that on the learning rates
    load    start from these weights and this state, which are of so many updates
    state   weights and state
    over    no more: whoever pulls is told
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer  # of the whole model; only its groups are looked at
    pieces: Sequence[ParameterSlice]
    statistics: Mapping[str, Tensor]  # buffers that are averaged over the workers; on the first server
    version: int = 0  # updates made
    is_over: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        whole = dict(self.model.named_parameters())
        self.parts = {
            piece: nn.Parameter(piece.of(whole[piece.name].data)) for piece in self.pieces
        }  # share the memory of the model
        names = {parameter: name for name, parameter in whole.items()}
        takes = inspect.signature(type(self.optimizer)).parameters
        # Fused kernels treat the last elements of a tensor otherwise: other bits, depending on where a parameter is cut (torch 2.13).
        plain = {"fused": False} if "fused" in takes else {}
        groups = []
        for group in self.optimizer.param_groups:
            own = {names[parameter] for parameter in group["params"]}
            options = {key: value for key, value in group.items() if key in takes and key != "params"} | plain
            groups.append(
                options | {"params": [part for piece, part in self.parts.items() if piece.name in own]}
            )
        defaults = {key: value for key, value in self.optimizer.defaults.items() if key in takes} | plain
        self.own_optimizer = type(self.optimizer)(groups, **defaults)
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.pushed: dict[int, dict[int, Message]] = {}  # step -> worker -> gradients
        self.waiting: list[tuple[int, int, Future[Message]]] = []
        self.copy: dict[ParameterSlice | str, Tensor] | None = (
            None  # of the weights, for all who pull this version
        )
        self.lock = threading.RLock()

    def answer(self, message: Message) -> "Future[Message]":
        with self.lock, torch.no_grad():
            if message.what == "pull":
                return self._pull(**message.facts)
            if message.what == "push":
                return answered(self._push(message))
            return answered(getattr(self, f"_{message.what}")(message))

    def _push(self, message: Message) -> Message:
        step, worker = message.facts["step"], message.facts["worker"]
        if step >= self.version:
            self.pushed.setdefault(step, {})[worker] = message
        return Message("kept")

    def _pull(self, need: int, have: int, worker: int) -> "Future[Message]":
        future: Future[Message] = Future()
        self.waiting.append((need, have, future))
        self._tell()
        return future

    def _tell(self) -> None:
        """Answer whoever has waited long enough."""
        ready = [entry for entry in self.waiting if self.is_over or entry[0] <= self.version]
        self.waiting = [entry for entry in self.waiting if not (self.is_over or entry[0] <= self.version)]
        for _, have, future in ready:
            tensors = self._weights() if self.version > have and not self.is_over else {}
            future.set_result(
                Message("weights", dict(tensors), {"version": self.version, "over": self.is_over})
            )

    def _weights(self) -> dict[ParameterSlice | str, Tensor]:
        if self.copy is None:
            self.copy = {piece: part.detach().clone().cpu() for piece, part in self.parts.items()}
            self.copy |= {name: buffer.clone().cpu() for name, buffer in self.statistics.items()}
        return self.copy

    def _sum(self, message: Message) -> Message:
        items: Mapping[int, float] = message.facts["items"]  # of each worker that counts
        came = self.pushed.get(message.facts["step"], {})
        whole = sum(items.values())
        squares = 0.0
        for piece, part in self.parts.items():
            grads = [
                came[worker].tensors[piece].to(part.device) * items[worker]
                for worker in sorted(items)
                if piece in came[worker].tensors
            ]
            part.grad = torch.stack(grads).sum(0).div_(whole).to(part.dtype) if grads else None
            squares += (
                float(torch.linalg.vector_norm(part.grad, dtype=torch.float64).square()) if grads else 0.0
            )
        for name, buffer in self.statistics.items():
            values = torch.stack([came[worker].tensors[name] for worker in sorted(items)])
            buffer.copy_(values.mean(0) if values.is_floating_point() else values.amax(0))
        return Message("summed", facts={"squares": squares})

    def _update(self, message: Message) -> Message:
        for group, lr in zip(self.own_optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * message.facts["lr_factor"]
        for part in self.parts.values():
            if part.grad is not None and message.facts["by"] != 1.0:
                part.grad.mul_(message.facts["by"])
        self.own_optimizer.step()
        self.own_optimizer.zero_grad()
        self.version += 1
        self.copy = None
        self.pushed = {step: of for step, of in self.pushed.items() if step >= self.version}
        self._tell()
        return Message("updated")

    def _load(self, message: Message) -> Message:
        for piece, part in self.parts.items():
            part.copy_(message.tensors[piece])
            state = {
                key[1]: value
                for key, value in message.tensors.items()
                if isinstance(key, tuple) and key[0] == piece
            }
            if state:
                self.own_optimizer.state[part].update(state)
        self.version = message.facts["version"]
        return Message("loaded")

    def _state(self, message: Message) -> Message:
        tensors: dict[object, Tensor] = {piece: part.detach().clone() for piece, part in self.parts.items()}
        for piece, part in self.parts.items():
            for key, value in self.own_optimizer.state.get(part, {}).items():
                if isinstance(value, Tensor):
                    tensors[piece, key] = value.clone()
        return Message("state", tensors)

    def _over(self, message: Message) -> Message:
        self.is_over = True
        self._tell()
        return Message("over")

    def _end(self, message: Message) -> Message:
        self.ended.set()
        return Message("ended")


def load_message(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    pieces: Sequence[ParameterSlice],
    version: int,
) -> Message:
    """What a shard starts from, of a whole model and its optimizer."""
    tensors: dict[object, Tensor] = {}
    for piece in pieces:
        tensors[piece] = piece.of(params[piece.name].detach()).clone()
        for key, value in cut_state(optimizer, params[piece.name], piece).items():
            if isinstance(value, Tensor):
                tensors[piece, key] = value.clone()
    return Message("load", tensors, {"version": version})
