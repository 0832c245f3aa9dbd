"""Plan: the layout of a training over ranks, and the short words it is written in."""

from dataclasses import dataclass, replace
from typing import Self

from paceline.errors import PlanError
from paceline.spec import nearest


@dataclass(frozen=True)
class Plan:
    """`dp` data ranks; what `zero` says of the training state is cut into shards, and `replicate` copies of all the shards are kept.

    zero=0: nothing is cut (DistributedDataParallel); 1: optimizer state (ZeroRedundancyOptimizer); 2: gradients and parameters at
    rest, whole from forward to backward; 3: parameters are whole only while their block computes (`fully_shard`).
    """

    zero: int = 0
    dp: int | None = None  # None: what remains of the ranks
    replicate: int = 1
    micro: int = 1  # micro-batches whose gradients are added up before an update

    def __post_init__(self) -> None:
        for key, value, least in (("dp", self.dp, 1), ("replicate", self.replicate, 1), ("micro", self.micro, 1)):
            if value is not None and value < least:
                raise PlanError(f"{key} must be at least {least}, got {key}={value}")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero must be 0, 1, 2 or 3, got zero={self.zero}")
        if self.replicate > 1 and self.zero < 2:
            raise PlanError(f"replicate={self.replicate} needs shards to replicate: use zero=2, zero=3 or hsdp, got zero={self.zero}")

    def __str__(self) -> str:
        if self.zero == 0 and self.dp == 1:
            word = "single"
        elif self.zero == 3 and self.replicate > 1:
            word = "hsdp"
        else:
            word = ("ddp", "zero1", "zero2", "zero3")[self.zero]
        options = [f"{key}={getattr(self, key)}" for key in KEYS if getattr(self, key) != getattr(WORDS[word], key)]
        return ",".join([word, *options])

    def on(self, ranks: int) -> Self:
        """This plan with its data degree said, for so many ranks. Raises PlanError when it does not fit them."""
        if self.dp is not None and self.dp != ranks:
            way_out = f"use --ranks {self.dp}" + (" or another plan: ddp, zero1, zero2, zero3" if self.dp == 1 else f" or dp={ranks}")
            raise PlanError(f"plan {self} is for {self.dp} rank{'s' * (self.dp > 1)}, got {ranks}: {way_out}")
        if ranks % self.replicate:
            fitting = [str(r) for r in range(2, ranks + 1) if ranks % r == 0]
            raise PlanError(
                f"plan {self} keeps {self.replicate} copies, which does not divide {ranks} rank{'s' * (ranks > 1)}: "
                + (f"use replicate={' or '.join(fitting)}, or zero3" if fitting else "use single")
            )
        return replace(self, dp=ranks)


WORDS = {
    "ddp": Plan(),
    "zero1": Plan(zero=1),
    "zero2": Plan(zero=2),
    "zero3": Plan(zero=3),
    "hsdp": Plan(zero=3, replicate=2),
    "single": Plan(dp=1),
}
KEYS = ("zero", "dp", "replicate", "micro")


def parse(text: str) -> Plan:
    """A plan from its words: `zero3`, `hsdp,replicate=4`, `dp=4,zero=2,micro=8`. `parse(str(plan)) == plan`. Raises PlanError."""
    plan = Plan()
    seen: set[str] = set()
    keys: dict[str, int] = {}
    for place, part in enumerate(word.strip() for word in text.split(",")):
        key, equals, value = part.partition("=")
        if key in seen:
            raise PlanError(f"plan {text!r} says {key} twice")
        seen.add(key)
        if not equals:
            if part not in WORDS:
                raise PlanError(f"plan {text!r}: there is no plan {part!r}{nearest(part, [*WORDS, *(f'{key}=' for key in KEYS)])}")
            if place:
                raise PlanError(f"plan {text!r}: {part} must come first, and alone of its kind")
            plan = WORDS[part]
            continue
        if key not in KEYS:
            raise PlanError(f"plan {text!r}: there is no key {key!r}{nearest(key, KEYS)}")
        if not value.isdecimal():
            raise PlanError(f"plan {text!r}: {key} must be a whole number, got {value!r}")
        if seen & {*WORDS} and key == "zero" and int(value) != plan.zero:
            raise PlanError(f"plan {text!r}: {', '.join(seen & {*WORDS})} is zero={plan.zero}, got zero={value}; say one of them")
        keys[key] = int(value)
    return replace(plan, **keys)


def share(batch: int, plan: Plan, ranks: int) -> int:
    """Samples of a micro-batch on one rank. Raises PlanError when the batch cannot be split so."""
    parts = ranks * plan.micro
    if batch % parts:
        below, above = batch - batch % parts, batch - batch % parts + parts
        way_out = f"use --batch {above}" + (f" or {below}" if below else "")
        raise PlanError(f"batch {batch} is not divisible by ranks × micro = {ranks} × {plan.micro} = {parts}: {way_out}")
    return batch // parts
