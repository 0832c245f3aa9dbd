"""ModelFacts of convolutional networks from their published tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from paceline.plan.model.facts import BlockFacts, ModelFacts, Product, TensorVolume

CLASSES = 1000


@dataclass(frozen=True)
class Conv:
    """A convolution with the batch norm and activation after it.

    size: of the output, in each direction. activation: elements that the activation keeps per output; 1 for
    ReLU in place or none, 2 for SiLU.
    """

    inputs: int
    outputs: int
    kernel: int
    size: int
    stride: int = 1
    groups: int = 1
    activation: float = 1.0

    @property
    def params(self) -> int:
        return self.kernel**2 * self.inputs // self.groups * self.outputs + 2 * self.outputs

    @property
    def product(self) -> Product:
        inner = self.kernel**2 * self.inputs / self.groups
        windows = max(1.0, (self.kernel / self.stride) ** 2)
        return Product(
            float(self.size**2), self.outputs / self.groups, inner, float(self.groups), reuse=windows
        )

    @property
    def given(self) -> float:
        return float(self.outputs * self.size**2)

    @property
    def kept(self) -> float:
        """Elements kept: the input, and the output for the batch norm.

        The next layer keeps the activation's output.
        """
        return self.inputs * (self.size * self.stride) ** 2 + self.given * self.activation

    @property
    def moved(self) -> float:
        """Elements that batch norm (two reads, a write) and activation (a read, a write) move in training."""
        return 5 * self.given


def _block(
    name: str,
    convs: list[Conv],
    extra: Sequence[Product] = (),
    extra_params: int = 0,
    extra_moved: float = 0.0,
) -> BlockFacts:
    first, last = convs[0], convs[-1]
    products = (*(conv.product for conv in convs), *extra)
    given = last.outputs * last.size**2
    return BlockFacts(
        name=name,
        params=sum(conv.params for conv in convs) + extra_params,
        products=products,
        saved={
            "none": TensorVolume(whole=sum(conv.kept for conv in convs)),
            "selective": TensorVolume(
                whole=sum(conv.given for conv in convs) + first.inputs * (first.size * first.stride) ** 2
            ),
            "full": TensorVolume(whole=float(first.inputs * (first.size * first.stride) ** 2)),
        },
        traffic=TensorVolume(whole=sum(conv.moved for conv in convs) + extra_moved),
        boundary=float(given),
        kernels=3 * len(convs) + 2,
    )


def _head(inputs: int, size: int) -> BlockFacts:
    return BlockFacts(
        name="head",
        params=inputs * CLASSES + CLASSES,
        products=(Product(1.0, CLASSES, inputs),),
        saved={"none": TensorVolume(whole=inputs * size**2 + inputs, split_bytes=4.0 * CLASSES)},
        traffic=TensorVolume(whole=float(inputs * size**2)),
        kernels=6,
    )


def resnet(name: str, depths: tuple[int, int, int, int], image: int = 224) -> ModelFacts:
    """Return facts of a bottleneck ResNet (He et al. 2016, arXiv 1512.03385, table 1).

    The stride is in the 3 × 3 convolution, as in torchvision.
    """
    stem = _block("stem", [Conv(3, 64, 7, image // 2, 2)], extra_moved=64 * (image / 2) ** 2 * 1.25)
    runs, inputs, size = [], 64, image // 4
    for stage, depth in enumerate(depths):
        width, stride = 64 * 2**stage, 1 if stage == 0 else 2
        size //= stride
        entry = [
            Conv(inputs, width, 1, size * stride),
            Conv(width, width, 3, size, stride),
            Conv(width, 4 * width, 1, size),
        ]
        short = Conv(inputs, 4 * width, 1, size, stride)
        residual = 3.0 * 4 * width * size**2
        runs.append((_block(f"entry {stage + 1}", [short, *entry], extra_moved=residual), 1))
        rest = [Conv(4 * width, width, 1, size), Conv(width, width, 3, size), Conv(width, 4 * width, 1, size)]
        runs.append((_block(f"block {stage + 1}", rest, extra_moved=residual), depth - 1))
        inputs = 4 * width
    return ModelFacts(name, stem, tuple(runs), _head(inputs, size), source="arXiv 1512.03385, table 1")


# kernel, stride, expansion, channels, layers: Tan and Le 2019 (arXiv 1905.11946), table 1
EFFICIENTNET_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


def efficientnet(name: str, wider: float = 1.0, deeper: float = 1.0, image: int = 224) -> ModelFacts:
    """Return facts of an EfficientNet scaled by its coefficients (arXiv 1905.11946, equation 3)."""
    size, inputs = ceil(image / 2), _round_to_eight(32 * wider)
    stem = _block("stem", [Conv(3, inputs, 3, size, 2, activation=2.0)])
    runs = []
    for stage, (kernel, stride, expansion, channels, layers) in enumerate(EFFICIENTNET_STAGES):
        outputs = _round_to_eight(channels * wider)
        for layer in range(ceil(layers * deeper)):
            by = stride if layer == 0 else 1
            runs.append(
                (_inverted(f"block {stage + 1}.{layer + 1}", inputs, outputs, kernel, by, expansion, size), 1)
            )
            size, inputs = ceil(size / by), outputs
    wide = _round_to_eight(1280 * wider)
    last = _block("last convolution", [Conv(inputs, wide, 1, size, activation=2.0)])
    return ModelFacts(name, stem, (*runs, (last, 1)), _head(wide, size), source="arXiv 1905.11946, table 1")


def _inverted(
    name: str, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, size: int
) -> BlockFacts:
    wide, after, squeezed = inputs * expansion, ceil(size / stride), max(1, inputs // 4)
    expand = [Conv(inputs, wide, 1, size, activation=2.0)] if expansion > 1 else []
    convs = [*expand, Conv(wide, wide, kernel, after, stride, wide, 2.0), Conv(wide, outputs, 1, after)]
    squeeze = [Product(1.0, squeezed, wide), Product(1.0, wide, squeezed)]
    return _block(name, convs, squeeze, 2 * wide * squeezed + squeezed + wide, 3.0 * wide * after**2)


def _round_to_eight(channels: float) -> int:
    """Return the nearest multiple of 8 that is at most a tenth below `channels`."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
