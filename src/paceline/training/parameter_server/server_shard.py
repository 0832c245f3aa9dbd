"""The shard of a server: its part of weights and optimizer state, and gradients of pending steps."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from paceline.training.optimization.optimizer_trial import copy_optimizer
from paceline.training.optimization.optimizer_values import decode_values, encode_value
from paceline.training.parameter_server.partition import ParameterSlice, slice_state
from paceline.training.parameter_server.rpc import Message, make_completed_future


@dataclass
class ServerShard:
    """Answers messages, by kind. Calls come from threads of the transport, and none of them blocks.

    * push: keep a worker's gradients of a step
    * pull: send the weights when they have `need` updates; send none if they have at most `have` updates
    * sum: average the gradients of a step over all items; return the square of the norm
    * update: make an update, with factors on the gradient and on the learning rates
    * load: start from these weights and this state, after `version` updates
    * state: send weights and state
    * over: the training is over; answer all pulls
    * end: end this server
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer  # of the whole model; only its groups are read
    slices: Sequence[ParameterSlice]
    statistics: Mapping[str, Tensor]  # buffers that are averaged over the workers; on the first server
    version: int = 0  # updates made
    is_over: bool = False
    is_done: bool = False  # whether the training is over because it is complete
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        whole = dict(self.model.named_parameters())
        # They share the memory of the model.
        self.parts = {slice_: nn.Parameter(slice_.of(whole[slice_.name].data)) for slice_ in self.slices}
        names = {parameter: name for name, parameter in whole.items()}
        # torch 2.13: fused kernels round the last elements of a tensor differently, so results would
        # depend on where a parameter is cut. The copy is unfused.
        groups = []
        for group in self.optimizer.param_groups:
            own = {names[parameter] for parameter in group["params"]}
            groups.append([part for slice_, part in self.parts.items() if slice_.name in own])
        self.own_optimizer = copy_optimizer(
            self.optimizer, groups, {id(parameter): parameter for parameter in whole.values()}
        )
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self.pushed: dict[int, dict[int, Message]] = {}  # step -> worker -> gradients
        self.pending_pulls: list[tuple[int, int, Future[Message]]] = []  # need, have, answer
        # Of the weights, for all workers that pull this version.
        self.copy: dict[ParameterSlice | str, Tensor] | None = None
        self.lock = threading.RLock()

    def answer(self, message: Message) -> "Future[Message]":
        with self.lock, torch.no_grad():
            if message.kind == "pull":
                return self._pull(**message.fields)
            if message.kind == "push":
                return make_completed_future(self._push(message))
            return make_completed_future(getattr(self, f"_{message.kind}")(message))

    def _push(self, message: Message) -> Message:
        step, worker = message.fields["step"], message.fields["worker"]
        if step >= self.version:
            self.pushed.setdefault(step, {})[worker] = message
        return Message("kept")

    def _pull(self, need: int, have: int, worker: int) -> "Future[Message]":
        future: Future[Message] = Future()
        self.pending_pulls.append((need, have, future))
        self._answer_pulls()
        return future

    def _answer_pulls(self) -> None:
        """Answer the pulls whose version has been reached; all of them if the training is over."""
        ready = [pull for pull in self.pending_pulls if self.is_over or pull[0] <= self.version]
        self.pending_pulls = [
            pull for pull in self.pending_pulls if not (self.is_over or pull[0] <= self.version)
        ]
        for _, have, future in ready:
            tensors = self._weights() if self.version > have and not self.is_over else {}
            future.set_result(
                Message(
                    "weights",
                    dict(tensors),
                    {"version": self.version, "over": self.is_over, "done": self.is_done},
                )
            )

    def _weights(self) -> dict[ParameterSlice | str, Tensor]:
        if self.copy is None:
            self.copy = {slice_: part.detach().clone().cpu() for slice_, part in self.parts.items()}
            self.copy |= {name: buffer.clone().cpu() for name, buffer in self.statistics.items()}
        return self.copy

    def _ping(self, message: Message) -> Message:
        return Message("alive")

    def _sum(self, message: Message) -> Message:
        items: Mapping[int, float] = message.fields["items"]  # of each worker that counts
        pushed = self.pushed.get(message.fields["step"], {})
        total_items = sum(items.values())
        squares = 0.0
        for slice_, part in self.parts.items():
            grads = [
                pushed[worker].tensors[slice_].to(part.device) * items[worker]
                for worker in sorted(items)
                if slice_ in pushed[worker].tensors
            ]
            part.grad = torch.stack(grads).sum(0).div_(total_items).to(part.dtype) if grads else None
            squares += (
                float(torch.linalg.vector_norm(part.grad, dtype=torch.float64).square()) if grads else 0.0
            )
        for name, buffer in self.statistics.items():
            values = torch.stack([pushed[worker].tensors[name] for worker in sorted(items)])
            buffer.copy_(values.mean(0) if values.is_floating_point() else values.amax(0))
        return Message("summed", fields={"squares": squares})

    def _update(self, message: Message) -> Message:
        for group, lr in zip(self.own_optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * message.fields["lr_factor"]
        for part in self.parts.values():
            if part.grad is not None and message.fields["grad_factor"] != 1.0:
                part.grad.mul_(message.fields["grad_factor"])
        self.own_optimizer.step()
        self.own_optimizer.zero_grad()
        self.version += 1
        self.copy = None
        self.pushed = {step: messages for step, messages in self.pushed.items() if step >= self.version}
        self._answer_pulls()
        return Message("updated")

    def _load(self, message: Message) -> Message:
        for slice_, part in self.parts.items():
            part.copy_(message.tensors[slice_])
            state = {
                key[1]: value
                for key, value in message.tensors.items()
                if isinstance(key, tuple) and key[0] == slice_
            }
            if state:
                self.own_optimizer.state[part].update(decode_values(state))
        self.version = message.fields["version"]
        return Message("loaded")

    def _state(self, message: Message) -> Message:
        tensors: dict[object, Tensor] = {slice_: part.detach().clone() for slice_, part in self.parts.items()}
        for slice_, part in self.parts.items():
            for key, value in self.own_optimizer.state.get(part, {}).items():
                for name, tensor in encode_value(key, value).items():
                    tensors[slice_, name] = tensor.clone()
        return Message("state", tensors)

    def _over(self, message: Message) -> Message:
        self.is_over, self.is_done = True, message.fields["done"]
        self._answer_pulls()
        return Message("over")

    def _end(self, message: Message) -> Message:
        self.ended.set()
        return Message("ended")


def make_load_message(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, nn.Parameter],
    slices: Sequence[ParameterSlice],
    version: int,
) -> Message:
    """Return the message from which a shard starts, given a whole model and its optimizer."""
    tensors: dict[object, Tensor] = {}
    for slice_ in slices:
        tensors[slice_] = slice_.of(params[slice_.name].detach()).clone()
        for key, value in slice_state(optimizer, params[slice_.name], slice_).items():
            for name, tensor in encode_value(key, value).items():
                tensors[slice_, name] = tensor.clone()
    return Message("load", tensors, {"version": version})
