"""Colours of the parts of time and memory, the same in every picture.

The hue shows the family: blue is computation, orange communication, green training state, grey waiting or
loss. Lightness differs within a family, so that the colours work for readers with red-green colour blindness
and in greyscale.
"""

COLOURS = {
    "products": "#08306b",
    "attention": "#2171b5",
    "other operations": "#6baed6",
    "computed again": "#c6dbef",
    "tensor parallel": "#7f2704",
    "context parallel": "#a63603",
    "expert parallel": "#8c2d04",
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
    "averaged weights": "#762a83",
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
    """Return the colour of a part, black if it has none."""
    return COLOURS.get(part, "#000000")
