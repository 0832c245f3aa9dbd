"""Networks for sets and graphs, written with torch alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from generative import mlp
from samples import CLASSES, Synthetic


class Points(nn.Module):
    """A function of each point, the maximum over points, a function of it (Qi et al., PointNet, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1), nn.ReLU()
        )
        self.head = mlp(32, 16, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.each(points.mT).amax(2))


class PointNet(Synthetic):
    def make(self, generator: Generator) -> Any:
        return torch.randn(20, 3, generator=generator), torch.randint(CLASSES, (), generator=generator)

    def model(self) -> nn.Module:
        return Points()

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class GraphConv(nn.Module):
    """Â X W (Kipf and Welling, GCN, 2017)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return F.relu(adjacency @ self.linear(x))


class GraphAttention(nn.Module):
    """Neighbours weighed by attention (Veličković et al., GAT, 2018)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.source, self.target = nn.Linear(outputs, 1), nn.Linear(outputs, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.linear(x)
        scores = F.leaky_relu(self.source(x) + self.target(x).mT, 0.2)
        return F.elu(scores.masked_fill(adjacency == 0, -1e9).softmax(-1) @ x)


class Messages(nn.Module):
    """Nodes are updated from the sum of messages of their neighbours (Gilmer et al., MPNN, 2017)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.message, self.cell = mlp(2 * inputs, 16, outputs), nn.GRUCell(outputs, inputs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        count = x.shape[1]
        pairs = [x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1)]
        messages = ((adjacency > 0)[..., None] * self.message(torch.cat(pairs, -1))).sum(2)
        return self.cell(messages.flatten(0, 1), x.flatten(0, 1)).view_as(x)


LAYERS = {"gcn": GraphConv, "gat": GraphAttention, "mpnn": Messages}


class GraphModel(nn.Module):
    def __init__(self, kind: str, width: int):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(LAYERS[kind](width, width) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, adjacency)
        return self.head(x.mean(1))


class Graph(Synthetic):
    """Classify random graphs. kind: of the layers, gcn, gat or mpnn."""

    kind: str = "gcn"
    nodes: int = 8
    width: int = 16

    def make(self, generator: Generator) -> Any:
        edges = (torch.rand(self.nodes, self.nodes, generator=generator) < 0.3).float()
        adjacency = (edges + edges.T + torch.eye(self.nodes)).clamp(max=1)
        degree = adjacency.sum(1).rsqrt()
        nodes = torch.randn(self.nodes, 4, generator=generator)
        label = torch.randint(CLASSES, (), generator=generator)
        return nodes, degree[:, None] * adjacency * degree, label

    def model(self) -> nn.Module:
        return GraphModel(self.kind, self.width)

    def inputs(self, batch: Any) -> Any:
        return batch[0], batch[1]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[2], reduction="none")
