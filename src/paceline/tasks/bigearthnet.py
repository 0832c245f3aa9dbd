"""BigEarthNet-S2 v1 or v2 (reBEN): several labels for each Sentinel-2 image. --set folder=PATH."""

from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline import SampleRng, Task
from paceline.data import transforms
from paceline.errors import TaskError
from paceline.metrics import Accumulator, MeanAveragePrecision, MultilabelF1
from paceline.tasks.bigearthnet_files import BigEarthNetImages, open_patches
from paceline.tasks.image_models import build_image_model

# Mean and standard deviation of each band over BigEarthNet-S2, as published with its models:
# git.tu-berlin.de/rsim/bigearthnet-models-tf, BigEarthNet.py
BANDS = {
    "B01": (340.76769064, 554.81258967),
    "B02": (429.9430203, 572.41639287),
    "B03": (614.21682446, 582.87945694),
    "B04": (590.23569706, 675.88746967),
    "B05": (950.68368468, 729.89827633),
    "B06": (1792.46290469, 1096.01480586),
    "B07": (2075.46795189, 1273.45393088),
    "B08": (2218.94553375, 1365.45589904),
    "B8A": (2266.46036911, 1356.13789355),
    "B09": (2246.0605464, 1302.3292881),
    "B11": (1594.42694882, 1079.19066363),
    "B12": (1009.32729131, 818.86747235),
}


class BigEarthNet(Task):
    """Which of 19 or 43 kinds of land an image shows, by a ResNet-50 on the bands of 10 m and 20 m.

    The splits are those of the data: the column `split` of v2, which is geographic, or the lists of v1.
    """

    folder: str  # of metadata.parquet and a .lmdb, or of the patches and train.csv, val.csv and test.csv
    arch: str = "resnet50"  # resnet18 …, efficientnet_b0 …, timm:NAME
    labels: Literal[19, 43] = 19  # number of classes; 43 are those of CORINE Land Cover, in v1 only
    size: int = 120  # height and width of the images for the model
    bands: tuple[str, ...] = ("B02", "B03", "B04", "B08", "B05", "B06", "B07", "B8A", "B11", "B12")

    def model(self) -> nn.Module:
        if unknown := [band for band in self.bands if band not in BANDS]:
            raise TaskError(f"no band {unknown[0]!r}; available: {', '.join(BANDS)}")
        return build_image_model(self.arch, self.labels, len(self.bands))

    def dataset(self, split: str) -> BigEarthNetImages | None:
        patches = open_patches(Path(self.folder), split, self.labels)
        return None if patches is None else BigEarthNetImages(patches, self.bands, self.size, self.labels)

    def batch_transform(self, batch: Any, rng: SampleRng) -> Any:
        """Mirror images both ways and turn them: an image from above has no top."""
        images = transforms.random_flip(batch[0], rng)
        images = transforms.random_flip(images.transpose(2, 3), rng)
        return images.transpose(2, 3).contiguous(), batch[1]

    def inputs(self, batch: Any) -> Tensor:
        mean, std = zip(*(BANDS[band] for band in self.bands), strict=True)
        return transforms.normalize(batch[0], mean, std)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, batch[1].to(output.dtype), reduction="none")

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Accumulator]:
        return {
            "f1": MultilabelF1().update(output, batch[1]),
            "map": MeanAveragePrecision().update(output, batch[1]),
        }
