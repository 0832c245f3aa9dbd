"""The graph of a model for TensorBoard, from a forward pass that computes only shapes."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.batch import find_tensors
from paceline.data.fake import example_batch, fake_parameters
from paceline.distributed.rng import seeded_rngs
from paceline.parallel.loss.forward import forward
from paceline.plan.plan import Plan
from paceline.report.tensorboard.graph_node import GraphNode
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.model_facts.model_analysis import build_meta_model


def build_model_graph(spec: Spec, task: Task) -> list[GraphNode]:
    """Return the operations of a forward pass in order, each after the values that it uses.

    Names are paths of modules, followed by the operation. Raises an Error if the model cannot run on tensors
    without values.
    """
    with seeded_rngs(spec.seed):
        model = build_meta_model(spec, task).model
        batch = example_batch(spec, task, Plan(dp=1).resolve(1))
        with fake_parameters(model) as make_fake:
            fake_batch = make_fake(batch)
            recorder = _GraphRecorder(model, find_tensors(fake_batch))
            with recorder:
                forward(task, model, fake_batch)
    return recorder.nodes


def write_model_graph(spec: Spec, task: Task, run: RunFolder) -> None:
    """Write the graph of a model for TensorBoard. Raises an Error or OSError."""
    from paceline.report.tensorboard.scalar_writer import ScalarWriter

    nodes = build_model_graph(spec, task)
    with contextlib.closing(ScalarWriter(run.tensorboard / "graph")) as writer:
        writer.write_graph(nodes, time.time())


class _GraphRecorder(TorchFunctionMode):
    """Records each function of torch that a model calls, in the module that calls it."""

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]):
        super().__init__()
        self.nodes: list[GraphNode] = []
        self._names: dict[int, str] = {}  # of the node that made a tensor, by the identity of the tensor
        self._kept: list[Tensor] = []  # so that no identity is used twice
        self._uses: Counter[str] = Counter()
        self._modules = [type(model).__name__]  # that run
        self._parameters = {id(tensor): name for name, tensor in model.named_parameters()}
        for index, tensor in enumerate(inputs):
            self._add(tensor, f"input/{index}", "Placeholder", ())
        for path, module in model.named_modules():
            if path:
                module.register_forward_pre_hook(
                    self._make_enter(f"{self._modules[0]}/{path.replace('.', '/')}")
                )
                module.register_forward_hook(self._leave, always_call=True)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        sources = [self._find_source(tensor) for tensor in find_tensors([args, kwargs or {}])]
        known = tuple(dict.fromkeys(source for source in sources if source is not None))
        outputs = [tensor for tensor in find_tensors(result) if id(tensor) not in self._names]
        if known and outputs:
            kind = getattr(function, "__name__", "operation").strip("_")
            name = self._make_unique(f"{self._modules[-1]}/{kind}")
            self._add(outputs[0], name, kind, known)
            for tensor in outputs[1:]:
                self._names[id(tensor)] = name
                self._kept.append(tensor)
        return result

    def _find_source(self, tensor: Tensor) -> str | None:
        parameter = self._parameters.get(id(tensor))
        if id(tensor) not in self._names and parameter is not None:
            path = f"{self._modules[0]}/{parameter.replace('.', '/')}"
            self._add(tensor, path, "Parameter", ())
        return self._names.get(id(tensor))

    def _add(self, tensor: Tensor, name: str, kind: str, sources: tuple[str, ...]) -> None:
        self.nodes.append(GraphNode(name, kind, sources, tuple(tensor.shape)))
        self._names[id(tensor)] = name
        self._kept.append(tensor)

    def _make_unique(self, name: str) -> str:
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}_{self._uses[name] - 1}"

    def _make_enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: self._modules.append(path)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._modules.pop()
