"""`Task.figures` at evaluations: called once, with whole outputs, and written as PNG and for TensorBoard."""

import contextlib
import importlib.util
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.batch import find_leaves, map_leaves
from paceline.data.samples import Batch
from paceline.errors import RunError, TaskError
from paceline.files import replaced
from paceline.parallel.loss.global_loss import gather_splits
from paceline.plotting.png import encode_figure, encode_png, is_figure
from paceline.run import RunFolder
from paceline.task import Task, has_figures
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.training.prepared import RankContext
    from paceline.training.step.step import TrainingStep

FOLDER = "figures"  # below that of the scalars: TensorBoard follows one growing file in a folder
NAME = re.compile(r"\w[\w .-]{0,99}")
MAX_FIGURES = 32  # of an evaluation
MAX_PIXELS = 2**24  # of a figure
MAX_KEPT = 50  # files of each figure: those of the last evaluations


class FigureWriter:
    """Draws and writes the figures of evaluations. Rank 0 calls the task; all ranks send it their samples."""

    def __init__(self, context: "RankContext"):
        self.context = context
        self.is_used = context.run is not None and has_figures(context.task)
        self._writer: Any = None

    def draw(
        self,
        step: int,
        update: "TrainingStep",
        output: Any,
        batch: Batch,
        own: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Write the figures of the first batch of a split. A collective.

        output, batch: of this rank. own: number of its samples; 0 if it only takes part.
        Raises TaskError for unsuitable figures.
        """
        if not self.is_used:
            return
        output = gather_splits(output)
        parts = [_copy_leaves(tree) for tree in (output, batch)] if own and update.counts else None
        gathered: list[Any] = [None] * dist.get_world_size(group)
        if dist.get_world_size(group) > 1:
            is_first = dist.get_rank(group) == 0
            dist.gather_object(
                (update.place.dp, own, parts), gathered if is_first else None, group=group, group_dst=0
            )
            if not is_first:
                return
        else:
            gathered = [(0, own, parts)]
        found = sorted((entry for entry in gathered if entry[2] is not None), key=lambda entry: entry[0])
        counts = [count for _, count, _ in found]
        whole = [
            _join(tree, [of_rank[at] for _, _, of_rank in found], counts, what)
            for at, (tree, what) in enumerate(((output, "output of the model"), (batch, "batch")))
        ]
        self._write(_call(self.context.task, *whole), step)

    def _write(self, figures: Mapping[str, bytes], step: int) -> None:
        run = self.context.run
        assert run is not None
        for name, png in figures.items():
            with contextlib.suppress(OSError, RunError):  # the disk is full; the run continues
                _write_png(run, name, step, png)
        if figures and self._writer is None and importlib.util.find_spec("tensorboard") is not None:
            from paceline.report.tensorboard.scalar_writer import ScalarWriter

            with contextlib.suppress(OSError):
                self._writer = ScalarWriter(run.tensorboard / FOLDER)
        if self._writer is not None:
            self._writer.write_images(figures, step, time.time())

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _copy_leaves(tree: Any) -> list[Any]:
    """Return the leaves of an output or batch, with tensors on the CPU."""
    return [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in find_leaves(tree)]


def _join(tree: Any, parts: list[list[Any]], counts: list[int], what: str) -> Any:
    """Return the tree with the leaves of all ranks. parts: leaves by rank. counts: samples by rank.

    Raises TaskError for leaves that have no value for all samples."""
    if len({len(leaves) for leaves in parts}) > 1:
        raise TaskError(f"figures(): the {what} has other numbers of tensors on other ranks; stack them")
    joined: list[Any] = []
    for leaves in zip(*parts, strict=True):
        first = leaves[0]
        is_split = all(
            isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count
            for leaf, count in zip(leaves, counts, strict=True)
        )
        if len(leaves) == 1 or not is_split:
            joined.append(first)  # such as a temperature
            continue
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise TaskError(
                f"figures(): a tensor of the {what} has rows of different sizes on ranks; pad with "
                "paceline.Ragged"
            )
        joined.append(torch.cat(leaves))
    remaining = iter(joined)
    return map_leaves(lambda _: next(remaining), tree)


def _call(task: Task, output: Any, batch: Batch) -> dict[str, bytes]:
    """Return the figures of a task as PNG by name. Raises TaskError."""
    with torch.random.fork_rng(devices=[]), UserCode("figures()", task.figures):
        figures: Any = task.figures(output, batch)
    if not isinstance(figures, Mapping):
        raise TaskError(f"figures() must return a dict of images, got {type(figures).__name__}")
    if len(figures) > MAX_FIGURES:
        raise TaskError(f"figures() returned {len(figures)} figures; return at most {MAX_FIGURES}")
    encoded = {}
    for name, figure in figures.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise TaskError(
                f"figures() returned the name {name!r:.60}; use letters, digits, spaces, dots, hyphens and "
                "underscores, at most 100"
            )
        encoded[name] = _encode(task, name, figure)
    return encoded


def _encode(task: Task, name: str, figure: Any) -> bytes:
    if is_figure(figure):
        with UserCode(f"figures(): drawing {name!r}", task.figures):
            return encode_figure(figure)
    if not hasattr(figure, "shape") or not hasattr(figure, "dtype"):
        raise TaskError(
            f"figures() returned {type(figure).__name__} for {name!r}; return a tensor, an array or a figure "
            "of matplotlib"
        )
    image = torch.as_tensor(figure).detach().cpu()
    if image.dim() == 2:
        image = image[None]
    if image.dim() != 3 or image.shape[0] not in (1, 3, 4) or not image.numel():
        raise TaskError(
            f"figures() returned an image of shape {tuple(figure.shape)} for {name!r}; return (height, "
            "width) or (channels, height, width) with 1, 3 or 4 channels"
        )
    if image.shape[1] * image.shape[2] > MAX_PIXELS:
        raise TaskError(
            f"figures() returned an image of shape {tuple(figure.shape)} for {name!r}; return at most "
            f"{MAX_PIXELS:,} pixels"
        )
    if image.is_floating_point():
        image = (image.float().nan_to_num(0.0).clamp(0, 1) * 255).round()
    elif image.dtype == torch.bool:
        image = image.to(torch.uint8) * 255
    elif image.dtype != torch.uint8:
        dtype = str(image.dtype).removeprefix("torch.")
        raise TaskError(
            f"figures() returned an image of {dtype} for {name!r}; return uint8 from 0 to 255, or floats "
            "from 0 to 1"
        )
    return encode_png(image.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def _write_png(run: RunFolder, name: str, step: int, png: bytes) -> None:
    """Write figures/NAME/step_N.png, and delete the oldest files of this figure."""
    folder = run.figures / name
    if folder.is_symlink():
        raise RunError(f"{folder} is a link; only folders are written to")
    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / f"step_{step:09}.png") as temporary:
        temporary.write_bytes(png)
    for old in sorted(folder.glob("step_*.png"))[:-MAX_KEPT]:
        old.unlink()
