"""Colours of the parts of time and memory: the same for a part in every picture.

Families by hue (blue computes, orange talks, green is the state of the training, grey waits or is lost), apart by lightness within one, so
that they can be told by who does not see red and green apart, and in grey.
"""

COLOURS = {
    "products": "#08306b",
    "attention": "#2171b5",
    "other operations": "#6baed6",
    "computed again": "#c6dbef",
    "tensor parallel": "#7f2704",
    "context parallel": "#a63603",
    "pipeline sends": "#d94801",
    "data parallel": "#f16913",
    "gathered weights": "#fdae6b",
    "optimizer": "#1b7837",
    "pipeline bubble": "#969696",
    "jitter": "#d9d9d9",
    "engines": "#bdbdbd",
    "input": "#636363",
    "save": "#525252",
    "weights": "#00441b",
    "main weights": "#5aae61",
    "cast weights": "#a6dba0",
    "gradients": "#d9f0d3",
    "activations": "#2171b5",
    "loss": "#6baed6",
    "gathered": "#fdae6b",
    "communication": "#f16913",
    "allocator": "#969696",
    "process": "#d9d9d9",
}
STRONG, WEAK = "#08306b", "#d94801"


def colour(part: str) -> str:
    return COLOURS.get(part, "#000000")
