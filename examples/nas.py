"""Search a small architecture: the operation of each edge of a cell, for handwritten digits.

paceline tune nas.py --metric "max accuracy" --sampler quasi-random --trials 4 --epochs 1 --lr 1e-2 --ranks 2
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.tasks.digits import Images, load

OPERATIONS: Mapping[str, Callable[[int], nn.Module]] = {
    "skip": lambda channels: nn.Identity(),
    "conv1": lambda channels: nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU()),
    "conv3": lambda channels: nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()),
    "pool": lambda channels: nn.AvgPool2d(3, 1, 1),
}
EDGES = ("edge01", "edge02", "edge12", "edge03", "edge13", "edge23")  # from node to node, as NAS-Bench-201


class Cell(nn.Module):
    """Four nodes. Each is the sum of operations on all nodes before it; the last is the output."""

    def __init__(self, channels: int, operations: Mapping[str, str]):
        super().__init__()
        self.edges = nn.ModuleDict({edge: OPERATIONS[name](channels) for edge, name in operations.items()})

    def forward(self, x_BCHW: Tensor) -> Tensor:
        nodes = [x_BCHW]
        for end in (1, 2, 3):
            incoming = [self.edges[f"edge{start}{end}"](node) for start, node in enumerate(nodes)]
            nodes.append(torch.stack(incoming).mean(0))
        return nodes[-1]


class CellSearch(Task):
    channels: int = 8
    cells: int = 2
    edge01: str = "conv3"
    edge02: str = "skip"
    edge12: str = "conv3"
    edge03: str = "skip"
    edge13: str = "skip"
    edge23: str = "conv3"

    def space(self) -> dict[str, str]:  # what `paceline tune` searches, unless --space names something else
        return {edge: ",".join(OPERATIONS) for edge in EDGES} | {"channels": "int:4:12:4"}

    def model(self) -> nn.Module:
        operations = {edge: getattr(self, edge) for edge in EDGES}
        cells = [Cell(self.channels, operations) for _ in range(self.cells)]
        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * self.channels, 10)]
        return nn.Sequential(nn.Conv2d(1, self.channels, 3, padding=1), *cells, *head)

    def dataset(self, split: str) -> Images:
        images, labels = load()
        part = slice(None, 1437) if split == "train" else slice(1437, None)
        return Images(images[part], labels[part])

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch[1]}
