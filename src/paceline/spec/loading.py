"""The table [data] of a request: the order of the samples, and how ranks read them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.spec.values import MAX_INT, Value


class MixtureWeights(Value):
    """Weights of the sources of a Mixture, from a sample on.

    MixtureWeights(first=64000, weights=(0.5, 0.5))
    """

    first: int = Field(ge=1, le=MAX_INT, description="number of the first sample with these weights")
    weights: tuple[float, ...] = Field(strict=False, description="weight of each source")


class Loading(Value):
    """The order of the samples, and how each rank reads them.

    Loading(workers=4, prefetch=2, shuffle="window")
    """

    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="worker processes that read samples, per rank"
        " [default: spare cores on a machine with GPUs, else 0]",
    )
    prefetch: int = Field(default=2, ge=1, le=1024, description="batches that each worker reads ahead")
    shuffle: Literal["full", "window", "none"] = Field(
        default="full",
        description="order of each epoch: a permutation of all samples, of blocks and then within windows"
        " (for files that are read in sequence), or as in the dataset",
    )
    window: int = Field(
        default=16384,
        ge=1,
        le=MAX_INT,
        description="samples of a window, which has 64 blocks of neighboring samples; shuffle=window only",
    )
    weights: tuple[MixtureWeights, ...] = Field(
        default=(),
        strict=False,
        description="changes of the weights of a Mixture, each from a sample on; resume --weights adds one",
    )

    skip_corrupt: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="training samples on each rank that may raise DataError; the next are used instead",
    )
    cache: Literal["off", "memory", "scratch"] = Field(
        default="off",
        description="where the ranks of a node keep samples that were read: /dev/shm, or a disk of the node",
    )
    cache_content: Literal["raw", "decoded"] | None = Field(
        default=None,
        description="what is cached: the bytes of files, or what [i] of the dataset returns"
        " [default: raw for Folder, Shards and Tokens, else decoded]",
    )
    cache_gib: float | None = Field(
        default=None, gt=0, le=1e9, description="limit of a cache, in GiB [default: half of the free space]"
    )
    cache_folder: str | None = Field(
        default=None,
        min_length=1,
        description="folder for cache=scratch [default: $SLURM_TMPDIR, $LOCAL_SCRATCH or $TMPDIR, or /tmp]",
    )
    stage: Literal["off", "before", "background"] = Field(
        default="off",
        description="when the cache is filled: before the first step, or meanwhile"
        " [default: off, when a sample is first read]",
    )

    @model_validator(mode="after")
    def _cache_options_need_a_cache(self) -> Self:
        for name in ("cache_content", "cache_gib", "cache_folder", "stage"):
            value = getattr(self, name)
            if self.cache == "off" and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"data.{name}={value!r} requires data.cache='memory' or 'scratch', got 'off'"
                )
        if self.cache != "scratch" and self.cache_folder is not None:
            raise ValueError(
                f"data.cache_folder={self.cache_folder!r} requires data.cache='scratch', got {self.cache!r}"
            )
        return self

    @model_validator(mode="after")
    def _window_needs_windows(self) -> Self:
        if self.shuffle != "window" and self.window != type(self).model_fields["window"].default:
            raise ValueError(
                f"data.window={self.window} requires data.shuffle='window', got {self.shuffle!r}"
            )
        return self
