"""Published trainings with large batches, to be shown beside those of the same data."""

from typing import NamedTuple

from paceline.plan.model.facts import ModelFacts

IMAGENET_SAMPLES = 1_281_167
RESNET50_PARAMETERS = range(25_400_000, 25_700_000)  # 25,557,032 with 1,000 classes


class PublishedTraining(NamedTuple):
    """A training of ResNet-50 on ImageNet."""

    batch: int
    steps: int
    accuracy: float
    optimizer: str
    source: str


RESNET50 = (
    PublishedTraining(8192, 14_076, 0.763, "sgd", "Goyal et al., 2017"),
    PublishedTraining(32_768, 3_519, 0.754, "lars", "You et al., 2018"),
    PublishedTraining(32_768, 2_503, 0.749, "lars", "You et al., 2018"),
    PublishedTraining(32_768, 3_519, 0.749, "rmsprop and sgd", "Akiba et al., 2017"),
    PublishedTraining(32_768, 3_519, 0.763, "lars", "Ying et al., 2018"),
    PublishedTraining(55_296, 2_086, 0.753, "lars", "Mikami et al., 2018"),
    PublishedTraining(65_536, 1_800, 0.758, "lars", "Jia et al., 2018"),
    PublishedTraining(81_920, 1_440, 0.751, "lars", "Yamazaki et al., 2019"),
)


def find_published(facts: ModelFacts, samples: int) -> tuple[PublishedTraining, ...]:
    """Return published trainings of the same model on as many samples; empty if there are none."""
    is_known = samples == IMAGENET_SAMPLES and round(facts.params) in RESNET50_PARAMETERS
    return RESNET50 if is_known else ()
