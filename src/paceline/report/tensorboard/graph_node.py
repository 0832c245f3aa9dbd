"""GraphNode: an operation, a parameter or an input in the graph of a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphNode:
    """A node of a graph.

    name: a path, whose folders are modules. kind: the operation. sources: names of the nodes whose values it
    uses. shape: of its first value.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
