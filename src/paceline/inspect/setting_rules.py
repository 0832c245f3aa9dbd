"""Rules about the request: precision, options without effect, threads, settings for GPUs."""

import statistics

from paceline.cluster.published import find_published_name, sheets
from paceline.inspect.contention import measure_contention
from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import NOT_APPLICABLE, Evidence, Missing, Outcome
from paceline.spec import Loading, Schedule, Spec
from paceline.units import several

TF32_CAPABILITY = 80  # NVIDIA Ampere: the first devices with TF32 (10 × compute capability)
TENSOR_CORES = 70  # NVIDIA Volta: the first devices with Tensor Cores, for fp16
MIN_CONVOLUTIONS = 3  # in a model with fewer, other layers dominate
RANKS_PER_CORE = 2  # more are never useful; up to two try a plan on a small machine
WORKERS_WAIT = 0.2  # of the time, in which a rank waits for a core
WORKERS_CORES = 0.5  # of the cores, which workers use

_NO_FACTS = Missing("the run was started by a version that did not record the machine")

WITH_FACTOR = ("step", "milestones", "plateau")
WITHOUT_LENGTH = ("constant", "step", "milestones", "cosine-restarts", "inverse-sqrt", "plateau")
WITHOUT_FLOOR = ("constant", "step", "milestones", "inverse-sqrt", "task")


def check_precision(facts: RunFacts) -> Outcome:
    """A precision in which the device cannot compute, so that it converts values back and forth."""
    started = facts.start
    if started.precision not in ("bf16", "fp16"):
        return NOT_APPLICABLE
    native = facts.facts.get("native_precision")
    if native is None and (name := find_published_name(started.device)) is not None:
        native = float(started.precision in sheets()[name].chip.dense)
    if native is None:
        return Missing(f"it is unknown whether {started.device} computes in {started.precision}")
    if native:
        return []
    device = "this CPU" if facts.is_cpu else started.device
    slow = "; on CPUs, bf16 was up to 7 times slower than fp32" if facts.is_cpu else ""
    return [
        Evidence(
            f"{device} cannot compute in {started.precision} and emulates it{slow}",
            {"native_precision": 0.0},
            None,
            f"{facts.again} --precision fp32",
            is_simulated=not facts.is_cpu,
        )
    ]


def check_ineffective_options(facts: RunFacts) -> Outcome:
    """Options that were set and change nothing."""
    return [
        Evidence(
            f"{option} has no effect: {reason}",
            fix=f"leave it out, or {fix}",
            is_simulated=option == "--tf32" and not facts.is_cpu,
        )
        for option, reason, fix in _find_ineffective(facts.request, facts)
    ]


def _find_ineffective(spec: Spec, facts: RunFacts) -> list[tuple[str, str, str]]:
    """Return the options without effect: what was set, why it has no effect, and what would have one."""
    found = []
    capability = facts.facts.get("capability")
    if spec.tf32:
        if facts.is_cpu:
            found.append(
                ("--tf32", "it applies to CUDA devices, and the training ran on the CPU", "use a GPU")
            )
        elif spec.precision != "fp32":
            found.append(
                ("--tf32", f"it applies to fp32, and the precision is {spec.precision}", "--precision fp32")
            )
        elif capability is not None and capability < TF32_CAPABILITY:
            found.append(("--tf32", f"{_device(facts)} has no TF32", "--precision fp16"))
    found += _find_ineffective_in(spec.schedule)
    if spec.data.prefetch != Loading().prefetch and spec.data.workers == 0:
        found.append(
            (f"data.prefetch={spec.data.prefetch}", "no worker reads samples ahead", "--workers 1 or more")
        )
    return found


def _find_ineffective_in(schedule: Schedule) -> list[tuple[str, str, str]]:
    """Return the options of a schedule without effect, as `_find_ineffective` does."""
    name, found = schedule.name, []
    if schedule.floor and name in WITHOUT_FLOOR:
        found.append(
            (
                f"schedule.floor={schedule.floor:g}",
                f"it is the end of schedules such as cosine, and the schedule is {name}",
                "--schedule cosine",
            )
        )
    if schedule.factor != Schedule().factor and name not in WITH_FACTOR:
        found.append(
            (
                f"schedule.factor={schedule.factor:g}",
                f"it is the decay of {', '.join(WITH_FACTOR)}, and the schedule is {name}",
                "--schedule plateau",
            )
        )
    if schedule.length is not None and name in WITHOUT_LENGTH:
        found.append(
            (
                f"schedule.length={schedule.length!r}",
                f"the schedule {name} has no end",
                "--schedule cosine",
            )
        )
    if schedule.start is not None and not schedule.warmup and name != "one-cycle":
        found.append(
            (
                f"schedule.start={schedule.start:g}",
                "it is the begin of the warm-up, and there is none",
                'schedule.warmup="1 epoch"',
            )
        )
    return found


def _device(facts: RunFacts) -> str:
    return facts.started.device if facts.started is not None else "the device"


def check_threads(facts: RunFacts) -> Outcome:
    """More threads than cores: threads take turns, and a rank that waits for a core delays all ranks."""
    started = facts.start
    cores, ranks = facts.facts.get("cores"), facts.facts.get("local_ranks")
    if not cores or not ranks:
        return _NO_FACTS
    if started.threads * ranks <= cores or (started.threads == 1 and ranks <= RANKS_PER_CORE * cores):
        return _find_many_workers(facts, cores, ranks)
    values = {"threads": started.threads, "local_ranks": ranks, "cores": cores}
    sentence = (
        f"{several(int(ranks), 'rank')} with {several(started.threads, 'thread')} each share "
        f"{several(int(cores), 'core')} of a machine"
    )
    if started.threads > 1:
        share = max(1, int(cores // ranks))
        return [Evidence(sentence, values, None, f"{facts.again} --set spec.threads={share}")]
    return [
        Evidence(
            f"{sentence}: the ranks take turns, so more ranks are not faster",
            values,
            None,
            f"{facts.again} --ranks {int(cores)}, or more nodes",
        )
    ]


def _find_many_workers(facts: RunFacts, cores: float, ranks: float) -> list[Evidence]:
    """Return a finding if processes that read samples take the cores from the ranks."""
    workers = facts.spec.data.workers if facts.spec is not None else None
    waited = measure_contention(facts)
    if not workers or waited is None or waited < WORKERS_WAIT or (workers + 1) * ranks <= 2 * cores:
        return []
    # Other programs may use the cores; and workers that wait for files do not.
    used = [
        sum(statistics.fmean(values) for values in columns if values) / 100
        for window in facts.windows
        if (columns := [window.values(f"rank{rank} workers cpu") for rank in window.ranks])
    ]
    if max(used, default=0.0) < WORKERS_CORES * cores:
        return []
    enough = max(1, int(cores // ranks) - 1)
    return [
        Evidence(
            f"{several(int(ranks), 'rank')} with {several(workers, 'worker')} each share "
            f"{several(int(cores), 'core')}: the workers use {max(used):.1f} cores, and a rank waits for a "
            f"core for {waited:.0%} of the time",
            {"workers": workers, "cores": cores, "workers_cores": max(used), "core_wait_share": waited},
            None,
            f"{facts.again} --workers {enough}, if samples cannot be prepared beforehand",
        )
    ]


def check_tf32(facts: RunFacts) -> Outcome:
    """Products in float32 on a GPU whose Tensor Cores are unused."""
    if facts.request.precision != "fp32":
        return NOT_APPLICABLE
    capability = facts.facts.get("capability")
    if capability is None:
        return Missing("the compute capability of the GPU was not recorded")
    if facts.request.tf32 or capability < TENSOR_CORES:
        return []
    use = "--tf32, or --precision bf16" if capability >= TF32_CAPABILITY else "--precision fp16"
    return [
        Evidence(
            f"fp32 products leave the Tensor Cores of {_device(facts)} unused",
            {"capability": capability / 10},
            None,
            f"{facts.again} {use}",
        )
    ]


def check_convolutions(facts: RunFacts) -> Outcome:
    """Convolutions on a GPU without channels_last (with 16-bit types) or without cudnn.benchmark."""
    convolutions = facts.facts.get("convolutions")
    if convolutions is None:
        return _NO_FACTS
    if convolutions < MIN_CONVOLUTIONS:
        return []
    found = []
    values = {name: facts.facts.get(name, 0.0) for name in ("convolutions", "channels_last")}
    uses_tensor_cores = facts.start.precision in ("bf16", "fp16") or (
        facts.spec is not None and facts.spec.tf32
    )
    if uses_tensor_cores and not facts.facts.get("channels_last"):
        found.append(
            Evidence(
                f"the weights of {convolutions:.0f} convolutions are not in channels_last, the format of "
                "Tensor Cores",
                values,
                None,
                "return model.to(memory_format=torch.channels_last) in model()",
            )
        )
    if not facts.facts.get("cudnn_benchmark"):
        found.append(
            Evidence(
                f"cuDNN does not search for the fastest kernels of {convolutions:.0f} convolutions",
                values | {"cudnn_benchmark": 0.0},
                None,
                "set torch.backends.cudnn.benchmark = True in model(), if all batches have one shape",
            )
        )
    return found
