"""Plan: the layout of a training over ranks, and the short text that describes it."""

from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.errors import PlanError
from paceline.plan.schedules import RUNNABLE_SCHEDULES, SCHEDULES, PipelineSchedule
from paceline.spec import suggest
from paceline.units import is_whole_number, several

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
        """Key of the random stream from which the rank draws dropout.

        Ranks that have the same samples and layers must draw the same masks for what they all compute.
        """
        return self.pp, self.dp

    @property
    def is_first_of_data(self) -> bool:
        """Whether this rank counts the samples that it shares with other ranks."""
        return not (self.pp or self.cp or self.tp)


@dataclass(frozen=True, eq=False)
class Plan:
    """Layout of a training over ranks: degrees of the axes, and options.

    `Plan(zero=3)` and `Plan(tp=2, pp=2)` are plans; `str` and `parse` convert them to text and back. The
    degrees multiply to the number of ranks: `dp` × `cp` × `tp` × `pp`. A key that is None is decided by
    `resolve`, which knows the number of ranks.

    zero: what is sharded over the data ranks. 0: nothing (DistributedDataParallel); 1: optimizer state
    (ZeroRedundancyOptimizer); 2: also gradients, and parameters between steps; 3: also parameters, which
    are whole only while their block computes (`fully_shard`).
    dp: degree of data parallelism; None: what remains of the ranks.
    replicate: number of copies of all shards.
    tp: degree of tensor parallelism, which splits weights by column and row (DTensor).
    pp: degree of pipeline parallelism, which splits layers (`torch.distributed.pipelining`).
    cp: degree of context parallelism, which splits the sequence (ring attention).
    ep: degree of expert parallelism: that many data ranks divide the experts among them. It can be
    predicted only: `check_trainable` refuses it.
    microbatches: micro-batches per rank whose gradients are added up before an update; None: 1, or 2·pp
    for a pipeline.
    pp_schedule: schedule of the pipeline; None: 1f1b, or gpipe if there are too few micro-batches.
    stages: stages per rank of the pipeline; None: as few as possible.
    uneven: 1 if the batches of data ranks may differ by one sample.
    recompute: which activations of a block the backward pass computes again: none, all (full), or all except
    those of products and attention (selective).
    period: local SGD; the weights are averaged every `period` steps.
    switch: step from which local SGD averages weights; before it, gradients are averaged.
    servers: number of ranks that keep the weights of a parameter server; the others are its workers.
    staleness: steps that a worker may be ahead of another.

    Raises PlanError for keys that contradict each other.
    """

    zero: int = 0
    dp: int | None = None
    replicate: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    microbatches: int | None = None
    pp_schedule: str | None = None
    stages: int | None = None
    uneven: int = 0
    recompute: str = "none"
    period: int | None = None
    switch: int | None = None
    servers: int | None = None
    staleness: int | None = None

    def __post_init__(self) -> None:
        for key, minimum in MINIMUM.items():
            value = getattr(self, key)
            if value is not None and value < minimum:
                raise PlanError(f"{key} must be at least {minimum}, got {key}={value}")
        if self.zero > 3:
            raise PlanError(f"zero must be 0, 1, 2 or 3, got zero={self.zero}")
        if self.replicate > 1 and self.zero < 2:
            raise PlanError(
                f"replicate={self.replicate} requires shards to replicate: use zero=2, zero=3 or hsdp, got "
                f"zero={self.zero}"
            )
        for key, value, known in (
            ("pp_schedule", self.pp_schedule, RUNNABLE_SCHEDULES),
            ("recompute", self.recompute, RECOMPUTE),
        ):
            if value is not None and value not in known:
                raise PlanError(f"there is no {key} {value!r}{suggest(value, known)}")
        if self.uneven > 1:
            raise PlanError(f"uneven must be 0 or 1, got uneven={self.uneven}")
        if self.uneven and (self.model_degree > 1 or self.is_asynchronous):
            raise PlanError(
                f"uneven=1 requires ddp, zero1, zero2, zero3 or hsdp, got plan {self}; leave it out"
            )
        self._check_pipeline()
        self._check_asynchronous()

    def _check_pipeline(self) -> None:
        for key in ("pp_schedule", "stages"):
            if self.pp == 1 and getattr(self, key) is not None:
                raise PlanError(
                    f"{key}={getattr(self, key)} requires a pipeline, got pp=1; use pp=2 or more, or leave "
                    f"{key} out"
                )
        if self.stages is None:
            return
        name = self.pp_schedule or "1f1b"
        schedule = SCHEDULES[name]
        if schedule.max_stages == 1 and self.stages > 1:
            raise PlanError(
                f"pp_schedule={name} takes one stage per rank, got stages={self.stages}; use "
                f"pp_schedule=interleaved"
            )
        if schedule.max_stages == 2 and self.stages != 2:
            raise PlanError(
                f"pp_schedule={name} takes two stages per rank, got stages={self.stages}; leave stages out"
            )
        if self.stages < schedule.min_stages:
            raise PlanError(
                f"pp_schedule={name} takes two stages or more per rank, got stages={self.stages}; use "
                f"pp_schedule=1f1b"
            )

    def _check_asynchronous(self) -> None:
        for key, other, example in (("switch", "period", 8), ("staleness", "servers", 1)):
            value = getattr(self, key)
            if value is not None and getattr(self, other) is None:
                raise PlanError(f"{key}={value} requires {other}, e.g. {other}={example},{key}={value}")
        if self.period is not None and self.servers is not None:
            raise PlanError(
                f"period={self.period} (local SGD) and servers={self.servers} (parameter server) exclude "
                f"each other; leave one out"
            )
        if self.is_asynchronous and (self.zero or self.model_degree > 1 or self.ep > 1):
            kind = "local-sgd" if self.period is not None else "parameter-server"
            raise PlanError(f"{kind} keeps the whole model on each rank; leave zero, tp, pp, cp and ep out")

    def __eq__(self, other: object) -> bool:
        """Compare by keys, so that a plan with all keys equals its `ResolvedPlan`."""
        return self._values() == other._values() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, key) for key in KEYS)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the update differs from that of one process."""
        return self.period is not None or self.servers is not None

    @property
    def model_degree(self) -> int:
        """Number of ranks that compute one sample together."""
        return self.tp * self.pp * self.cp

    @property
    def splits_model(self) -> bool:
        """Whether tp or pp divide the model before data ranks do."""
        return self.tp * self.pp > 1

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of weights separately from those of activations."""
        return self.pp_schedule is not None and SCHEDULES[self.pp_schedule].splits_backward

    @property
    def num_servers(self) -> int:
        """Ranks that keep the weights of a parameter server; 0 without one."""
        return self.servers or 0

    @property
    def batch_sharers(self) -> str:
        """The word for the ranks that divide a batch among them."""
        return "data ranks" if self.model_degree > 1 else "workers" if self.servers else "ranks"

    @property
    def loss_pp_rank(self) -> int:
        """The pp rank that has the last stage of a pipeline, and with it the loss."""
        is_folded = self.pp_schedule is not None and SCHEDULES[self.pp_schedule].folded
        return 0 if is_folded else self.pp - 1

    @property
    def default_microbatches(self) -> int:
        """Micro-batches of a plan that does not specify their number."""
        return 2 * self.pp if self.pp > 1 else 1

    def __str__(self) -> str:
        name = self._name()
        options = [
            f"{key}={getattr(self, key)}"
            for key in KEYS
            if getattr(self, key) != getattr(NAMED_PLANS.get(name, Plan()), key)
        ]
        return ",".join([name, *options] if name else options)

    def _name(self) -> str:
        if self.servers is not None:
            return "parameter-server"
        if self.period is not None:
            return "post-local-sgd" if self.switch else "local-sgd"
        if self.zero:
            return "hsdp" if self.zero == 3 and self.replicate > 1 else f"zero{self.zero}"
        if self.model_degree > 1:
            return ""
        return "single" if self.dp == 1 else "ddp"

    def resolve(self, num_ranks: int) -> "ResolvedPlan":
        """Return this plan for `num_ranks` ranks, with all keys decided.

        Raises PlanError if it does not fit `num_ranks`.
        """
        dp = self._data_degree(num_ranks)
        if dp % self.replicate:
            divisors = [degree for degree in range(2, dp + 1) if dp % degree == 0]
            noun = f"{'data ' * (self.model_degree > 1)}rank{'s' * (dp > 1)}"
            if divisors:
                hint = f"use replicate={_or(divisors)}, or zero3"
            else:
                hint = "leave replicate out" if self.model_degree > 1 else "use single"
            raise PlanError(
                f"plan {self} keeps {self.replicate} copies, which does not divide {dp} {noun}: {hint}"
            )
        if dp % self.ep:
            raise PlanError(
                f"plan {self}: ep={self.ep} data ranks share the experts, which does not divide dp={dp}; use "
                f"ep={_or([degree for degree in range(1, dp + 1) if dp % degree == 0][:4])}"
            )
        microbatches = self.microbatches or self.default_microbatches
        pp_schedule, stages = self.pp_schedule, self.stages
        if self.pp > 1:
            pp_schedule = pp_schedule or ("1f1b" if microbatches >= self.pp else "gpipe")
            stages = stages or SCHEDULES[pp_schedule].min_stages
            self._check_microbatches(pp_schedule, microbatches)
        values = dict(zip(KEYS, self._values(), strict=True))
        values |= {"dp": dp, "microbatches": microbatches, "pp_schedule": pp_schedule, "stages": stages}
        return ResolvedPlan(**values)

    def _data_degree(self, num_ranks: int) -> int:
        servers, model_degree = self.num_servers, self.model_degree
        if servers and servers >= num_ranks:
            raise PlanError(
                f"plan {self} has {servers} servers and no worker on {several(num_ranks, 'rank')}: use "
                f"--ranks {servers + 1} or more"
            )
        if self.dp is not None and self.dp * model_degree + servers != num_ranks:
            required = self.dp * model_degree + servers
            hints = [f"use --ranks {required}"]
            if required == 1:
                hints.append("another plan: ddp, zero1, zero2, zero3")
            elif (num_ranks - servers) % model_degree == 0:
                hints.append(f"dp={(num_ranks - servers) // model_degree}")
            raise PlanError(
                f"plan {self} is for {several(required, 'rank')}, got {num_ranks}: {' or '.join(hints)}"
            )
        if num_ranks % model_degree:
            axes = " × ".join(
                f"{key}={getattr(self, key)}" for key in ("cp", "tp", "pp") if getattr(self, key) > 1
            )
            below = num_ranks // model_degree * model_degree
            fitting = [ranks for ranks in (below, below + model_degree) if ranks]
            raise PlanError(
                f"plan {self} requires a multiple of {axes} = {model_degree} ranks, got {num_ranks}: use "
                f"--ranks {_or(fitting)}"
            )
        return num_ranks // model_degree - servers

    def _check_microbatches(self, pp_schedule: str, microbatches: int) -> None:
        schedule = SCHEDULES[pp_schedule]
        if schedule.allows(microbatches, self.pp):
            return
        required = (
            f"a multiple of pp={self.pp} micro-batches"
            if schedule.microbatches == "multiple of pp"
            else f"pp={self.pp} micro-batches or more"
        )
        enough = -(-microbatches // self.pp) * self.pp
        raise PlanError(
            f"plan {self}: pp_schedule={pp_schedule} requires {required}, got microbatches={microbatches}; "
            f"use microbatches={enough} or pp_schedule=gpipe"
        )


@dataclass(frozen=True, eq=False)
class ResolvedPlan(Plan):
    """A plan for a known number of ranks, as `Plan.resolve` returns it; by default of one process."""

    dp: int = 1
    microbatches: int = 1

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule of the pipeline; of a plan without one, 1f1b with one stage."""
        return SCHEDULES[self.pp_schedule or "1f1b"]

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank; 1 without a pipeline."""
        return self.stages or 1

    @property
    def data_ranks(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.dp * self.cp

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that have the same layers."""
        return self.dp * self.cp * self.tp

    def index_in_stage(self, place: MeshCoordinate) -> int:
        """Return the index of a rank among those with the same layers."""
        return (place.dp * self.cp + place.cp) * self.tp + place.tp

    def place(self, rank: int) -> MeshCoordinate:
        """Return the coordinates of a rank.

        Neighbours split weights; the ranks farthest from each other split layers.
        """
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return MeshCoordinate(pp=pp, dp=dp, cp=cp, tp=tp)


def _or(values: list[int]) -> str:
    return " or ".join(map(str, values))


AUTO: Final = "auto"  # stands for the fastest plan that fits
KEYS = tuple(Plan.__dataclass_fields__)
TEXT_KEYS = ("pp_schedule", "recompute")
MINIMUM = {
    key: 0 if key in ("zero", "uneven", "staleness", "switch") else 1 for key in KEYS if key not in TEXT_KEYS
}
NAMED_PLANS = {
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
    """Return the plan that a text describes, e.g. `zero3`, `hsdp,replicate=4` or `dp=2,tp=2,pp=2,zero=2`.

    `parse(str(plan)) == plan`. Raises PlanError.
    """
    plan = Plan()
    name = ""
    seen: set[str] = set()
    values: dict[str, Any] = {}
    for position, part in enumerate(word.strip() for word in text.split(",")):
        key, equals, value = part.partition("=")
        if key in seen:
            raise PlanError(f"plan {text!r} has {key} twice")
        seen.add(key)
        if not equals:
            if part not in NAMED_PLANS:
                raise PlanError(
                    f"plan {text!r}: there is no plan "
                    f"{part!r}{suggest(part, [*NAMED_PLANS, *(f'{key}=' for key in KEYS)])}"
                )
            if position:
                raise PlanError(
                    f"plan {text!r}: {part} must come first, and a plan has only one name; leave {part} out"
                )
            plan, name = NAMED_PLANS[part], part
            continue
        if key not in KEYS:
            raise PlanError(f"plan {text!r}: there is no key {key!r}{suggest(key, KEYS)}")
        if key not in TEXT_KEYS and not is_whole_number(value):
            raise PlanError(f"plan {text!r}: {key} must be a whole number, got {value!r}")
        if name and key == "zero" and int(value) != plan.zero:
            raise PlanError(
                f"plan {text!r}: {name} means zero={plan.zero}, got zero={value}; leave one of them out"
            )
        values[key] = value if key in TEXT_KEYS else int(value)
    return replace(plan, **values)


def micro_batch_size(batch: int, plan: ResolvedPlan) -> int:
    """Return the samples of a micro-batch on one data rank.

    Some workers of a parameter server, and some ranks of an uneven plan, have one sample more.
    Raises PlanError if `plan` cannot divide a batch of `batch` samples.
    """
    parts = plan.dp * plan.microbatches
    if (plan.servers or plan.uneven) and batch >= parts:  # servers weight what each worker sends
        one_rank = replace(plan, dp=1, servers=None, staleness=None, uneven=0)
        return micro_batch_size(batch, one_rank) // plan.dp
    if batch % parts:
        below, above = batch - batch % parts, batch - batch % parts + parts
        hint = f"use --batch {above}" + (f" or {below}" if below else "")
        divisor = (
            f"{plan.batch_sharers} × microbatches = {plan.dp} × {plan.microbatches} = {parts}"
            if plan.dp > 1
            else f"microbatches={plan.microbatches}"
        )
        raise PlanError(f"batch {batch} is not divisible by {divisor}: {hint}")
    return batch // parts


def check_trainable(plan: Plan) -> None:
    """Raise PlanError for a plan that can be predicted but not trained."""
    if plan.ep > 1:
        raise PlanError(
            f"plan {plan}: ep={plan.ep} can be predicted, but Paceline does not train experts in parallel; "
            "leave ep out"
        )


def read_plan(text: str | None, num_ranks: int, batch: int) -> tuple[Plan, ResolvedPlan]:
    """Return the plan that `text` describes, and the same plan resolved.

    text: None means `single` for one rank, else `ddp`.

    Raises PlanError if it does not fit `num_ranks` and `batch`.
    """
    plan = parse(text) if text is not None else Plan(dp=1) if num_ranks == 1 else Plan()
    check_trainable(plan)
    resolved = plan.resolve(num_ranks)
    micro_batch_size(batch, resolved)
    return plan, resolved
