"""A copy of a model on fake tensors, whose forward pass shows where it can be cut into stages."""

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.data.fake import fake_pass_error
from paceline.data.samples import Batch
from paceline.errors import PlanError
from paceline.parallel.autograd_graph import find_reached_parameters
from paceline.parallel.loss.forward import autocast, call_loss, call_model
from paceline.parallel.module_hooks import CallInterceptor, find_parts
from paceline.parallel.pipeline.forward_trace import ForwardTrace
from paceline.parallel.pipeline.tracer import DependencyTracer
from paceline.task import Layout, Task
from paceline.torch_compat import fused_layers_disabled
from paceline.user_code import UserCode


class StandInModel:
    """A copy of a model whose parameters and buffers are fake tensors, for tracing.

    Make it while the model is as its constructor left it.
    """

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device):
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.device = device
        self.copy = copy.deepcopy(model)
        self.interceptor = CallInterceptor(find_parts(self.copy, layout))
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}  # id of a fake parameter -> name
        # Buffers whose values only the stage that changes them knows.
        self.local_buffers: frozenset[str] = frozenset()
        self.trainable = {name for name, parameter in self.copy.named_parameters() if parameter.requires_grad}
        fakes: dict[int, Tensor] = {}
        parameter_names = {id(parameter): name for name, parameter in self.copy.named_parameters()}
        for module in self.copy.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        fakes[id(tensor)] = fakes.get(id(tensor), self.make_fake(tensor))
                        tensors[key] = fakes[id(tensor)]  # type: ignore[assignment]
                        if id(tensor) in parameter_names:
                            self.names[id(fakes[id(tensor)])] = parameter_names[id(tensor)]

    def make_fake(self, tensor: Tensor) -> Tensor:
        with self.fake_mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def trace_step(self, task: Task, batch: Batch, precision: str) -> ForwardTrace:
        """Trace a pass in training.

        If the pass changes buffers, evaluations must find them in the same stage, so an evaluation is
        traced too.
        """
        trace = self.trace(task, batch, precision, training=True)
        if any(use.changed and use.outside for use in trace.buffers.values()):
            with contextlib.suppress(PlanError):  # a real evaluation will raise it
                trace.merge_evaluation(self.trace(task, batch, precision, training=False))
        return trace

    def trace(self, task: Task, batch: Batch, precision: str, training: bool) -> ForwardTrace:
        """Trace a forward pass. Raise PlanError if the model cannot run without values."""
        while True:
            trace = self._trace_once(task, batch, precision, training)
            local = {name for name, use in trace.buffers.items() if use.is_local}
            if local <= self.local_buffers:
                return trace
            self.local_buffers |= local  # values read from these depend on parameters

    def _trace_once(self, task: Task, batch: Batch, precision: str, training: bool) -> ForwardTrace:
        self.copy.train(training)
        buffers = [(module._buffers, dict(module._buffers)) for module in self.copy.modules()]
        tracer = DependencyTracer(self.copy, self.interceptor, self.names, self.local_buffers, training)
        self.interceptor.visitor = tracer.visit_call
        try:
            with (
                fused_layers_disabled(),
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(training),
                tracer,
                autocast(precision, self.device),
            ):
                output = call_model(task, self.copy, batch)
                tracer.finish(_compute_results(task, output, batch, training))
        except PlanError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # from user code that needs values
            raise fake_pass_error(error, "where a pipeline may cut it", "a plan without pp") from error
        finally:
            self.interceptor.visitor, self.interceptor.inside = None, False
            for own, before in buffers:
                own.update(before)  # a model may assign them
        return tracer.trace

    def find_parameters_with_grad(self, task: Task, batch: Batch, precision: str) -> frozenset[str] | None:
        """Return the names of the parameters that get gradients in a plain pass.

        None: the task's loss needs values, so this is unknown.
        """
        parameters = [
            tensor
            for module in self.copy.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        ]
        trainable = [tensor for tensor in parameters if self.names[id(tensor)] in self.trainable]
        self.copy.train()
        try:
            for tensor in trainable:
                tensor.requires_grad_()
            user_code = UserCode("the forward pass without values", task.model)
            with (
                user_code,
                torch.random.fork_rng(devices=[]),
                torch.enable_grad(),
                autocast(precision, self.device),
            ):
                loss = call_loss(task, call_model(task, self.copy, batch), batch)
                return frozenset(
                    self.names[leaf] for leaf in find_reached_parameters(loss) if leaf in self.names
                )
        except Exception:  # from user code that needs values
            return None
        finally:
            for tensor in trainable:
                tensor.requires_grad_(False)


def _compute_results(task: Task, output: Any, batch: Batch, training: bool) -> list[Any]:
    """Return what the task computes from an output: loss and, in evaluation, metrics."""
    try:
        with UserCode("the forward pass without values", task.loss):
            metrics = [] if training else list(task.metrics(output, batch).values())
            # The state of an accumulator does not show what it uses.
            whole = [output] * any(not isinstance(metric, Tensor) for metric in metrics)
            return [call_loss(task, output, batch), *metrics, *whole]
    except Exception:  # from user code that needs values; assume that it uses the whole output
        return tree_leaves(output)
