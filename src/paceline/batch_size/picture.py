"""The picture of a comparison of batches: steps, samples and time to the target over batches."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.batch_size.convergence import ConvergenceCurve
from paceline.batch_size.result import BatchResult
from paceline.batch_size.target import Target
from paceline.plotting.figure import COLOURS, figure
from paceline.units import format_count

MOST_TICKS = 8  # of batches, so that their labels do not overlap


def draw(results: Sequence[BatchResult], target: Target, curve: ConvergenceCurve | None, path: Path) -> None:
    """Draw samples and steps over batches, with the fit and its band of 68 %, into an SVG or PNG file."""
    reached = [result for result in results if result.steps is not None]
    with figure(path, 10.0, 4.6) as canvas:
        left, right = canvas.subplots(1, 2)
        batches = [result.batch for result in reached]
        left.plot(batches, [result.samples for result in reached], "o", color=COLOURS[0], label="measured")
        right.plot(batches, [result.steps for result in reached], "o", color=COLOURS[0], label="measured")
        if curve is not None:
            every = [result.batch for result in results]
            grid = np.geomspace(min(every), 2 * max(every), 60)
            found = [curve.predict(float(batch)) for batch in grid]
            for axes, divisor in ((left, np.ones_like(grid)), (right, grid)):
                fitted = np.array([curve.form(float(batch)) for batch in grid]) / divisor
                axes.plot(grid, fitted, color=COLOURS[1], label="fit")
                low, high = (
                    np.array([getattr(at, name) for at in found]) / divisor for name in ("low", "high")
                )
                axes.fill_between(grid, low, high, color=COLOURS[1], alpha=0.2, linewidth=0)
                axes.axvline(
                    curve.critical_batch.value, linestyle="--", color="0.45", linewidth=1, label="knee"
                )
        for axes, name in ((left, "samples"), (right, "steps")):
            axes.set(xlabel="batch", ylabel=f"{name} to {target}", xscale="log", yscale="log")
            axes.set_xticks([result.batch for result in results][:: -(-len(results) // MOST_TICKS)])
            axes.xaxis.set_major_formatter(lambda batch, _: f"{batch:,.0f}")
            axes.xaxis.set_minor_formatter(lambda *_: "")
            axes.yaxis.set_major_formatter(lambda count, _: format_count(count))
            axes.yaxis.set_minor_formatter(lambda n, _: format_count(n) if f"{n:e}"[0] in "235" else "")
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
