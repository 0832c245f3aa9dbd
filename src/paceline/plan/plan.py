"""Plan: the layout of a training over ranks, and the short words it is written in."""

from dataclasses import dataclass, replace
from typing import Any, Final, Self

from paceline.errors import PlanError
from paceline.spec import nearest
from paceline.units import is_whole_number, several

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "zero-bubble": 2,
    "zbv": 2,
}  # name -> stages of each rank, if not said
TWICE = (
    "zero-bubble",
    "zbv",
)  # schedules that compute the gradients of weights apart from those of activations
RECOMPUTE = ("none", "full", "selective")


@dataclass(frozen=True)
class MeshCoordinate:
    """Coordinates of a rank on the axes of its plan."""

    pp: int
    dp: int
    cp: int
    tp: int

    @property
    def stream(self) -> tuple[int, int]:
        """Which random stream a rank draws dropout from: ranks that share samples and layers must agree where they compute the same."""
        return self.pp, self.dp

    @property
    def is_first_of_data(self) -> bool:
        """Of the ranks with the same samples the one that counts them."""
        return not (self.pp or self.cp or self.tp)


@dataclass(frozen=True)
class Plan:
    """The degrees of the axes multiply to the ranks: `dp` × `cp` × `tp` × `pp`.

    dp: data. What `zero` says of the training state is cut over the data ranks, and `replicate` copies of all the shards are kept.
    zero=0: nothing is cut (DistributedDataParallel); 1: optimizer state (ZeroRedundancyOptimizer); 2: gradients and parameters at
    rest, whole from forward to backward; 3: parameters are whole only while their block computes (`fully_shard`).
    tp: weights by column and row (DTensor). pp: layers (`torch.distributed.pipelining`). cp: the sequence (ring attention).

    `period`: local SGD, the weights are averaged each so many steps, from step `switch` on; before it, gradients are (post-local SGD).
    `servers`: so many ranks keep the weights and the others train against them; no worker is more than `staleness` steps ahead of another.
    """

    zero: int = 0
    dp: int | None = None  # None: what remains of the ranks
    replicate: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    microbatches: int | None = (
        None  # micro-batches whose gradients are added up before an update; None: 1, or twice the stages of a pipeline
    )
    pp_schedule: str | None = None  # of a pipeline; None: 1f1b
    stages: int | None = None  # of a pipeline, on each rank; None: as few as the schedule takes
    uneven: int = (
        0  # 1: the shares of the data ranks may differ by one sample, where a batch cannot be divided alike
    )
    recompute: str = "none"  # activations of blocks in the backward pass: none, all, or but those of products and attention
    period: int | None = None
    switch: int | None = None
    servers: int | None = None
    staleness: int | None = None

    def __post_init__(self) -> None:
        for key, least in LEAST.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise PlanError(f"{key} must be at least {least}, got {key}={value}")
        if self.zero > 3:
            raise PlanError(f"zero must be 0, 1, 2 or 3, got zero={self.zero}")
        if self.replicate > 1 and self.zero < 2:
            raise PlanError(
                f"replicate={self.replicate} needs shards to replicate: use zero=2, zero=3 or hsdp, got zero={self.zero}"
            )
        for key, value, known in (
            ("pp_schedule", self.pp_schedule, SCHEDULES),
            ("recompute", self.recompute, RECOMPUTE),
        ):
            if value is not None and value not in known:
                raise PlanError(f"there is no {key} {value!r}{nearest(value, known)}")
        if self.uneven > 1:
            raise PlanError(f"uneven must be 0 or 1, got uneven={self.uneven}")
        if self.uneven and (self.tp * self.pp * self.cp > 1 or self.is_asynchronous):
            raise PlanError(
                f"uneven=1 is of ddp, zero1, zero2, zero3 and hsdp, got plan {self}; leave it out"
            )
        self._check_pipeline()
        self._check_asynchronous()

    def _check_pipeline(self) -> None:
        for key in ("pp_schedule", "stages"):
            if self.pp == 1 and getattr(self, key) is not None:
                raise PlanError(
                    f"{key}={getattr(self, key)} is of a pipeline, got pp=1; say pp=2 or more, or leave {key} out"
                )
        if self.stages is not None:
            one, schedule = SCHEDULES[self.pp_schedule or "1f1b"] == 1, self.pp_schedule or "1f1b"
            if one and self.stages > 1:
                raise PlanError(
                    f"pp_schedule={schedule} has one stage on each rank, got stages={self.stages}; use pp_schedule=interleaved"
                )
            if schedule == "zbv" and self.stages != 2:
                raise PlanError(
                    f"pp_schedule=zbv has two stages on each rank, got stages={self.stages}; leave stages out"
                )
            if not one and self.stages == 1:
                raise PlanError(
                    f"pp_schedule={schedule} has two stages or more on each rank, got stages=1; use pp_schedule=1f1b"
                )

    def _check_asynchronous(self) -> None:
        for key, of in (("switch", "period"), ("staleness", "servers")):
            if getattr(self, key) is not None and getattr(self, of) is None:
                raise PlanError(f"{key}={getattr(self, key)} needs {of}=, which is not said")
        if self.period is not None and self.servers is not None:
            raise PlanError(
                f"period={self.period} is of local SGD and servers={self.servers} of a parameter server; say one of them"
            )
        if self.is_asynchronous and (self.zero or self.tp * self.pp * self.cp > 1):
            what = "local-sgd" if self.period is not None else "parameter-server"
            raise PlanError(f"{what} keeps the whole model on each rank; leave zero, tp, pp and cp out")

    @property
    def is_asynchronous(self) -> bool:
        """Whether the update is another one than that of one process."""
        return self.period is not None or self.servers is not None

    def __str__(self) -> str:
        word = self._word()
        options = [
            f"{key}={getattr(self, key)}"
            for key in KEYS
            if getattr(self, key) != getattr(WORDS.get(word, Plan()), key)
        ]
        return ",".join([word, *options] if word else options)

    def _word(self) -> str:
        if self.servers is not None:
            return "parameter-server"
        if self.period is not None:
            return "post-local-sgd" if self.switch else "local-sgd"
        if self.zero:
            return "hsdp" if self.zero == 3 and self.replicate > 1 else f"zero{self.zero}"
        if self.tp * self.pp * self.cp > 1:
            return ""
        return "single" if self.dp == 1 else "ddp"

    def on(self, ranks: int) -> Self:
        """This plan with its data degree, its micro-batches, schedule and stages said, for so many ranks. Raises PlanError when it
        does not fit them."""
        servers = self.servers or 0
        cut = self.tp * self.pp * self.cp
        axes = "".join(
            f" × {key}={getattr(self, key)}" for key in ("cp", "tp", "pp") if getattr(self, key) > 1
        )
        if servers and servers >= ranks:
            raise PlanError(
                f"plan {self} has {servers} servers and no worker on {several(ranks, 'rank')}: use --ranks {servers + 1} or more"
            )
        if self.dp is not None and self.dp * cut + servers != ranks:
            wanted = self.dp * cut + servers
            another = [f"dp={(ranks - servers) // cut}"] if (ranks - servers) % cut == 0 else []
            hint = " or ".join(
                [
                    f"use --ranks {wanted}",
                    *(["another plan: ddp, zero1, zero2, zero3"] if wanted == 1 else another),
                ]
            )
            raise PlanError(f"plan {self} is for {several(wanted, 'rank')}, got {ranks}: {hint}")
        if ranks % cut:
            fitting = [cut * (ranks // cut + more) for more in (0, 1) if ranks // cut + more]
            raise PlanError(
                f"plan {self} needs a multiple of {axes[3:]} = {cut} ranks, got {ranks}: use --ranks {_or(fitting)}"
            )
        dp = ranks // cut - servers
        if dp % self.replicate:
            fitting = [r for r in range(2, dp + 1) if dp % r == 0]
            raise PlanError(
                f"plan {self} keeps {self.replicate} copies, which does not divide {dp} {'data ' * (cut > 1)}rank{'s' * (dp > 1)}: "
                + (
                    f"use replicate={_or(fitting)}, or zero3"
                    if fitting
                    else "use single"
                    if cut == 1
                    else "leave replicate out"
                )
            )
        microbatches = self.microbatches or (2 * self.pp if self.pp > 1 else 1)
        schedule = (
            (self.pp_schedule or ("1f1b" if microbatches >= self.pp else "gpipe")) if self.pp > 1 else None
        )
        stages = (self.stages or SCHEDULES[schedule]) if schedule else None
        many = schedule is not None and SCHEDULES[schedule] > 1
        if (schedule == "1f1b" and microbatches < self.pp) or (many and microbatches % self.pp):
            needs = (
                f"a multiple of pp={self.pp} micro-batches" if many else f"pp={self.pp} micro-batches or more"
            )
            enough = -(-microbatches // self.pp) * self.pp
            raise PlanError(
                f"plan {self}: pp_schedule={schedule} needs {needs}, got microbatches={microbatches}; use microbatches={enough} or pp_schedule=gpipe"
            )
        return replace(self, dp=dp, microbatches=microbatches, pp_schedule=schedule, stages=stages)

    @property
    def data_ranks(self) -> int:
        """Ranks over which gradients are averaged; of a plan whose data degree is said."""
        return (self.dp or 1) * self.cp

    @property
    def copies(self) -> int:
        """Ranks that have the same layers; of a plan whose data degree is said."""
        return (self.dp or 1) * self.cp * self.tp

    def copy(self, place: MeshCoordinate) -> int:
        """Which of the ranks with the same layers stands there."""
        return (place.dp * self.cp + place.cp) * self.tp + place.tp

    @property
    def sharers(self) -> str:
        """What those are called that share a batch."""
        return "data ranks" if self.is_mixed or self.cp > 1 else "workers" if self.servers else "ranks"

    @property
    def is_mixed(self) -> bool:
        """Whether a model is cut before data ranks come into it."""
        return self.tp * self.pp > 1

    @property
    def last(self) -> int:
        """The pp rank that has the last stage of a pipeline, and with it the loss."""
        return 0 if self.pp_schedule == "zbv" else self.pp - 1

    def place(self, rank: int) -> MeshCoordinate:
        """Where a rank stands; of a plan whose data degree is said. Neighbours split weights, those furthest apart layers."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp or 1)
        return MeshCoordinate(pp=pp, dp=dp, cp=cp, tp=tp)


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))


AUTO: Final = "auto"  # stands for the fastest plan that fits
KEYS = tuple(Plan.__dataclass_fields__)
TEXTS = ("pp_schedule", "recompute")
LEAST = {
    key: 0 if key in ("zero", "uneven", "staleness", "switch") else 1 for key in KEYS if key not in TEXTS
}
WORDS = {
    "ddp": Plan(),
    "zero1": Plan(zero=1),
    "zero2": Plan(zero=2),
    "zero3": Plan(zero=3),
    "hsdp": Plan(zero=3, replicate=2),
    "single": Plan(dp=1),
    "local-sgd": Plan(period=8),
    "post-local-sgd": Plan(period=8, switch=100),
    "parameter-server": Plan(servers=1),
}


def parse(text: str) -> Plan:
    """A plan from its words: `zero3`, `hsdp,replicate=4`, `dp=2,tp=2,pp=2,zero=2`. `parse(str(plan)) == plan`. Raises PlanError."""
    plan = Plan()
    seen: set[str] = set()
    keys: dict[str, Any] = {}
    for place, part in enumerate(word.strip() for word in text.split(",")):
        key, equals, value = part.partition("=")
        if key in seen:
            raise PlanError(f"plan {text!r} says {key} twice")
        seen.add(key)
        if not equals:
            if part not in WORDS:
                raise PlanError(
                    f"plan {text!r}: there is no plan {part!r}{nearest(part, [*WORDS, *(f'{key}=' for key in KEYS)])}"
                )
            if place:
                raise PlanError(f"plan {text!r}: {part} must come first, and alone of its kind")
            plan = WORDS[part]
            continue
        if key not in KEYS:
            raise PlanError(f"plan {text!r}: there is no key {key!r}{nearest(key, KEYS)}")
        if key not in TEXTS and not is_whole_number(value):
            raise PlanError(f"plan {text!r}: {key} must be a whole number, got {value!r}")
        if seen & {*WORDS} and key == "zero" and int(value) != plan.zero:
            raise PlanError(
                f"plan {text!r}: {', '.join(seen & {*WORDS})} is zero={plan.zero}, got zero={value}; say one of them"
            )
        keys[key] = value if key in TEXTS else int(value)
    return replace(plan, **keys)


def share(batch: int, plan: Plan) -> int:
    """Samples of a micro-batch on one data rank, of a plan whose data degree is said; some workers of a parameter server have one more, and
    some ranks of an uneven plan. Raises PlanError when it cannot be split so."""
    assert plan.dp is not None
    assert plan.microbatches is not None
    parts = plan.dp * plan.microbatches
    if (plan.servers or plan.uneven) and batch >= parts:  # servers weigh what each worker sends
        return share(batch, replace(plan, dp=1, servers=None, staleness=None, uneven=0)) // plan.dp
    if batch % parts:
        below, above = batch - batch % parts, batch - batch % parts + parts
        hint = f"use --batch {above}" + (f" or {below}" if below else "")
        by = (
            f"{plan.sharers} × microbatches = {plan.dp} × {plan.microbatches} = {parts}"
            if plan.dp > 1
            else f"microbatches={plan.microbatches}"
        )
        raise PlanError(f"batch {batch} is not divisible by {by}: {hint}")
    return batch // parts


def laid_out(said: str | None, ranks: int, batch: int) -> tuple[Plan, Plan]:
    """The plan as it is said, or what is taken where none is, and the same with its data degree said. Raises PlanError when it does not
    fit ranks and batch."""
    plan = parse(said) if said is not None else Plan(dp=1) if ranks == 1 else Plan()
    on = plan.on(ranks)
    share(batch, on)
    return plan, on
