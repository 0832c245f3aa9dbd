"""Augmentation of batches of images by random numbers that belong to their samples.

    from paceline.data import transforms

    def batch_transform(self, batch, rng):
        images, labels = batch
        images = transforms.random_flip(transforms.random_crop(images, rng, 32, padding=4), rng)
        return transforms.mixup(images, labels, rng, classes=10)

Images have the shape (batch, channels, height, width) and are uint8 from 0 to 255, or floating-point numbers
from 0 to 1. In `Task.transform`, one image is a batch of one: `random_flip(image[None], rng)[0]`.
"""

from paceline.data.transforms.color import adjust_brightness as adjust_brightness
from paceline.data.transforms.color import adjust_contrast as adjust_contrast
from paceline.data.transforms.color import adjust_hue as adjust_hue
from paceline.data.transforms.color import adjust_saturation as adjust_saturation
from paceline.data.transforms.color import color_jitter as color_jitter
from paceline.data.transforms.geometry import center_crop as center_crop
from paceline.data.transforms.geometry import normalize as normalize
from paceline.data.transforms.geometry import random_crop as random_crop
from paceline.data.transforms.geometry import random_flip as random_flip
from paceline.data.transforms.geometry import random_resized_crop as random_resized_crop
from paceline.data.transforms.geometry import resize as resize
from paceline.data.transforms.library import by_sample as by_sample
from paceline.data.transforms.library import seeded as seeded
from paceline.data.transforms.mix import cutmix as cutmix
from paceline.data.transforms.mix import mixup as mixup
