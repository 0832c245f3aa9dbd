"""Support matrix: each plan on each model of the zoo, verified against one process.

    python benchmarks/works.py [--ranks 2 4 8] [--write docs/works.md]

Takes minutes; on eight ranks and few cores, hours. The page is written again after each model. Without
--write it is printed.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from paceline import Spec
from paceline.errors import Error
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import Plan
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import parse_value
from paceline.verify.report import format_reason, format_verdict, max_difference
from paceline.verify.run import Verdict, Verification, choose_batch

LARGE_RANKS, FEW_STEPS = 8, 2
TIMEOUT_S = 600.0  # per plan
ZOO = Path(__file__).with_name("zoo.py").resolve()
MODELS = {
    "digits": "digits width=4",
    "text": "text width=32 depth=8 heads=8 context=16",
    "Encoder": f"{ZOO}:TransformerEncoder",
    "Llama": f"{ZOO}:Llama",
    "Llama, tied": f"{ZOO}:Llama tied=true",
    "GPT-2": f"{ZOO}:Gpt2",
    "ResNet": f"{ZOO}:ResNet",
    "uneven": f"{ZOO}:Uneven",
}
DESCRIPTIONS = {
    "digits": "the CNN of the built-in task",
    "text": "the byte-level GPT of the built-in task",
    "Encoder": "torch's `nn.TransformerEncoder`",
    "Llama": "Llama of Hugging Face, with rotary positions and grouped-query attention",
    "Llama, tied": "the same Llama, with one matrix for both embeddings",
    "GPT-2": "GPT-2 of Hugging Face, with a prime vocabulary size",
    "ResNet": "the blocks of ResNet-18, with BatchNorm",
    "uneven": "an MLP in which all sizes are odd",
}
HEAD = """# What works for which model

`python benchmarks/works.py --ranks 2 4 8 --write docs/works.md` writes this page. It
[verifies](verify.md) each plan on each model: it compares the plan with one process, for {steps} steps in
float64 over gloo. The models are as small as possible.

- ✓: loss, gradient norm, and all gradients, parameters and buffers equal those of one process to
  1e-10; the largest difference is {furthest:.0e}
- a number: the plan is refused; the reason is below the table
- ✗: the result differs

On eight ranks, each training makes two steps, with one micro-batch or the number that the schedule
requires. Plans with `tp` or `pp` then use `zero3` or no `zero`.

{models}

The torch version is {torch}.
"""
Results = dict[int, dict[str, list[Verdict] | str]]  # by number of ranks and model


def select_plans(ranks: int) -> list[Plan]:
    """Return the plans for a number of ranks.

    From LARGE_RANKS, variants with two micro-batches are left out, and so are tp and pp with zero1 and zero2.
    """
    return [
        plan
        for plan in enumerate_candidates(ranks)
        if ranks < LARGE_RANKS
        or (plan.microbatches is None and (plan.zero in (0, 3) or not plan.splits_model))
    ]


def build_spec(words: str, ranks: int, steps: int) -> Spec:
    task, *fields = words.split()
    settings = {key: parse_value(value) for key, _, value in (field.partition("=") for field in fields)}
    return Spec(task=task, set=settings, batch=choose_batch(16, select_plans(ranks), ranks), steps=steps)


def verify_model(words: str, ranks: Ranks, steps: int) -> list[Verdict] | str:
    """Return the verdict of each plan, or the reason why the model is not available."""
    start = time.perf_counter()
    try:
        with Verification(build_spec(words, ranks.size, steps), ranks, TIMEOUT_S) as verification:
            verification.reference()
            verdicts = [verification.try_verify(plan) for plan in select_plans(ranks.size)]
    except Error as error:
        return str(error)
    for verdict in verdicts:
        if is_wrong(verdict):
            print(f"{words} {verdict.plan}: {format_verdict(verdict)}", file=sys.stderr)
    print(f"{words} on {ranks.size} ranks: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return verdicts


def format_table(ranks: int, results: dict[str, list[Verdict] | str]) -> list[str]:
    """Return the lines of the table for a number of ranks, and the reasons below it."""
    reasons: dict[str, int] = {}
    lines = [
        f"## {ranks} ranks",
        "",
        "| plan | " + " | ".join(results) + " |",
        "| -- |" + " :-: |" * len(results),
    ]

    def mark(verdict: Verdict) -> str:
        if verdict.same:
            return "✓"
        if verdict.cannot_be is not None:
            return str(reasons.setdefault(format_reason(verdict), len(reasons) + 1))
        return "✗"

    for index, plan in enumerate(select_plans(ranks)):
        marks = [mark(result[index]) if isinstance(result, list) else "" for result in results.values()]
        lines.append(f"| `{plan}` | {' | '.join(marks)} |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items()), ""]
    lines += [f"{name}: {result}\n" for name, result in results.items() if isinstance(result, str)]
    for name, result in results.items():
        if isinstance(result, list):
            lines += [
                f"✗ {name}, `{verdict.plan}`: {format_verdict(verdict)}\n"
                for verdict in result
                if is_wrong(verdict)
            ]
    return lines


def is_wrong(verdict: Verdict) -> bool:
    """Return whether a plan was accepted and gave another result."""
    return not verdict.same and verdict.cannot_be is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    results: Results = {}
    for size in options.ranks:
        results[size] = {}
        with Ranks(size) as ranks:
            for name in options.models:
                steps = options.steps if size < LARGE_RANKS else FEW_STEPS
                results[size][name] = verify_model(MODELS[name], ranks, steps)
                if options.write is not None:
                    options.write.write_text(format_page(results, options.steps))
    if options.write is None:
        print(format_page(results, options.steps))
    if any(is_wrong(verdict) for verdict in all_verdicts(results)):
        sys.exit(1)


def all_verdicts(results: Results) -> list[Verdict]:
    return [
        verdict
        for by_model in results.values()
        for result in by_model.values()
        if isinstance(result, list)
        for verdict in result
    ]


def format_page(results: Results, steps: int) -> str:
    names = dict.fromkeys(name for by_model in results.values() for name in by_model)
    head = HEAD.format(
        steps=steps,
        models="\n".join(f"- *{name}*: {DESCRIPTIONS[name]}" for name in names),
        furthest=max(
            (max_difference(verdict) for verdict in all_verdicts(results) if verdict.same), default=0.0
        ),
        torch=torch.__version__.partition("+")[0],
    )
    lines = [line for size, by_model in results.items() for line in format_table(size, by_model)]
    return "\n".join([head, *lines]).rstrip() + "\n"


if __name__ == "__main__":
    main()
