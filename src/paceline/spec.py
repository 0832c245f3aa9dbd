"""What is wanted of a training: frozen values, read from TOML, overridden by `key=value`; nothing is repaired in silence."""

import copy
import difflib
import os
import re
import sys
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from paceline.errors import SpecError

DEFAULT_EPOCHS = 20
LENGTH = re.compile(r"\d{1,12}(\.\d{1,6})? (sample|step|epoch)s?", re.ASCII)


class Value(BaseModel):
    """Frozen, comparable, strict: an unknown key and a wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def check_printable(value: BaseModel, *names: str) -> None:
    """Raise ValueError where a field has control characters, which would make two lines of one in a job script or a terminal."""
    for name in names:
        for text in _texts(getattr(value, name)):
            if not text.isprintable():
                raise ValueError(f"{name} must be printable and of one line, got {text!r}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for pair in value.items() for one in pair for text in _texts(one))
    elif isinstance(value, tuple):
        yield from (text for one in value for text in _texts(one))


Decay = Annotated[float, Field(ge=0, lt=1)]
Samples = int | str  # a number of samples, or "50 steps", "5 epochs"
MOST = 2**63 - 1  # TOML and torch count in 64 bits
DEEPEST = 50  # levels of a value


class Optimizer(Value):
    """Defaults are torch's, but that `lr` of SGD is asked for in the same field."""

    name: Literal["adamw", "sgd"] = Field(
        default="adamw", description="optimizer, unless the task has its own"
    )
    lr: float = Field(default=1e-3, gt=0, description="learning rate, before the schedule's factor")
    weight_decay: float = Field(
        default=0.0, ge=0, description="decoupled for adamw, added to the gradient for sgd"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    nesterov: bool = Field(default=False, description="Nesterov momentum, of sgd")
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.999), strict=False, description="decay rates of the moments, of adamw"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment, of adamw")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the whole gradient")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0, got momentum=0.0")
        return self


class Schedule(Value):
    """Factor on the learning rate, counted in samples, so that it does not depend on ranks or micro-batches."""

    name: Literal["constant", "cosine", "linear", "step"] = Field(
        default="constant", description="shape behind the warm-up"
    )
    warmup: Samples = Field(default=0, description='linear warm-up: samples, or "50 steps", "5 epochs"')
    floor: float = Field(default=0.0, ge=0, le=1, description="of cosine and linear: the factor at the end")
    every: Samples | None = Field(
        default=None, description='of step: samples between two decays, or "50 steps", "5 epochs"'
    )
    factor: float = Field(default=0.1, gt=0, le=1, description="of step: the factor of each decay")

    @field_validator("warmup", "every", mode="before")
    @classmethod
    def _is_a_length(cls, value: Any, about: ValidationInfo) -> Any:
        least = 0 if about.field_name == "warmup" else 1
        is_number = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST
        if (
            is_number
            or (value is None and about.field_name == "every")
            or (isinstance(value, str) and LENGTH.fullmatch(value))
        ):
            return value
        wanted = f"samples (a whole number, at least {least}), '50 steps' or '5 epochs'"
        raise ValueError(f"schedule.{about.field_name} must be {wanted}, got {shown(value)}")

    @model_validator(mode="after")
    def _step_needs_every(self) -> Self:
        if (self.name == "step") != (self.every is not None):
            raise ValueError(
                f"schedule.every (samples between two decays) belongs to name='step', got name={self.name!r}, every={self.every}"
            )
        return self

    def in_samples(self, batch: int, samples: int) -> Self:
        """The same with all lengths in samples, where a step has `batch` of them and an epoch has `samples`."""

        def counted(length: Samples) -> int:
            if isinstance(length, int):
                return length
            number, unit = length.split()
            return round(
                float(number) * {"sample": 1, "step": batch, "epoch": samples}[unit.removesuffix("s")]
            )

        every = max(1, counted(self.every)) if self.every is not None else None
        return self.model_copy(update={"warmup": counted(self.warmup), "every": every})


class Save(Value):
    """When to write checkpoints, besides the one at the end, and which to keep."""

    every: int | None = Field(default=None, gt=0, le=MOST, description="steps between two checkpoints")
    minutes: float = Field(
        default=10.0,
        gt=0,
        allow_inf_nan=True,
        description="minutes between two checkpoints; inf: never by time",
    )
    keep: int = Field(
        default=2, ge=1, le=MOST, description="number of recent checkpoints to keep, besides the best"
    )
    best: str = Field(
        default="min loss", description="metric of the evaluation by which one is best: min NAME or max NAME"
    )

    @model_validator(mode="after")
    def _best_is_a_direction(self) -> Self:
        if not re.fullmatch(r"(min|max) \S+", self.best):
            raise ValueError(f"save.best must be 'min NAME' or 'max NAME', got {self.best!r}")
        return self


class Loading(Value):
    """How each rank reads its samples."""

    workers: int | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="reading processes per rank [default: spare cores on a machine with GPUs, else 0]",
    )
    prefetch: int = Field(default=2, ge=1, le=1024, description="batches that each worker reads ahead")


class Spec(Value):
    """What is wanted: task, global batch, length, optimizer, schedule, seed, precision."""

    task: str = Field(
        default="digits", description='built-in name, "path/to/file.py:Class" or "package.module:Class"'
    )
    set: dict[str, Any] = Field(default={}, description="fields of the task: its hyper-parameters")
    batch: int = Field(
        default=64,
        ge=1,
        le=10**9,
        description="samples of the global batch; the plan decides how it is split",
    )
    epochs: float | None = Field(
        default=None, gt=0, le=1e9, description=f"length in epochs [default: {DEFAULT_EPOCHS}]"
    )
    steps: int | None = Field(default=None, ge=1, le=10**12, description="length in steps, instead of epochs")
    seed: int = Field(default=0, ge=0, le=MOST, description="of weights, order of samples and dropout")
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = Field(
        default="fp32", description="in which the model computes"
    )
    tf32: bool = Field(default=False, description="let CUDA round the inputs of float32 products to TF32")
    compile: bool = Field(default=False, description="compile the model's blocks with torch.compile")
    allow_local_loss: bool = Field(
        default=False, description="accept a loss that mixes the samples of a batch"
    )
    batch_norm: Literal["global", "local"] = Field(
        default="global", description="BatchNorm statistics over all ranks, or of each rank"
    )
    evaluate_every: int | None = Field(
        default=None, ge=1, le=MOST, description="steps between evaluations [default: each epoch and the end]"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="of torch on each rank [default: cores ÷ ranks of the machine, fewer where other processes keep cores busy]",
    )
    profile: bool | None = Field(
        default=None,
        description="profile steps for paceline profile [default: as many as cost less than 1 % of the time]",
    )
    timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=1e6,
        description="seconds a rank waits for another; at least 600 until all have made a step",
    )
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    save: Save = Save()
    data: Loading = Loading()

    @field_validator("task", mode="before")
    @classmethod
    def _task_is_named(cls, task: Any) -> Any:
        """The ranks import it themselves, so that a class or an object is of no use to them."""
        if isinstance(task, str):
            return task
        kind = task if isinstance(task, type) else type(task)
        if not hasattr(kind, "dataset"):
            return task
        if "<locals>" in kind.__qualname__:
            fix = "move it to the top of a module, and name it: task='my.py:Class'"
        else:
            module = sys.modules.get(kind.__module__)
            place = (
                getattr(module, "__file__", None) or "my.py"
                if kind.__module__ == "__main__"
                else kind.__module__
            )
            fix = f"write task={f'{place}:{kind.__qualname__}'!r}" + (
                "" if isinstance(task, type) else ", set={'field': value}"
            )
        raise SpecError(
            f"task must be a name, got the {'class' if kind is task else 'object'} {kind.__qualname__}; {fix}"
        )

    @model_validator(mode="after")
    def _names_are_of_one_line(self) -> Self:
        check_printable(self, "task")
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs={self.epochs:g} and steps={self.steps} are two lengths of one training; say one of them"
            )
        return self

    def total_steps(self, samples: int) -> int:
        """Steps until done, when an epoch has `samples`. Batches run across epochs, so only the last one goes over the end."""
        if self.steps is not None:
            return self.steps
        return max(1, -(-round((self.epochs or DEFAULT_EPOCHS) * samples) // self.batch))


class Launch(Value):
    """How the ranks are started; in a TOML file these keys stand beside those of Spec."""

    plan: str | None = Field(
        default=None, description="[default: single on one rank, else ddp]; auto: the fastest that fits"
    )
    chosen: str | None = Field(default=None, description="written by Paceline: why it took this plan")
    asked: str | None = Field(
        default=None, description="written by Paceline: the plan that was asked for, where it took another"
    )
    asked_ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="written by Paceline: for how many ranks it was asked"
    )
    ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="processes in all [default: one per GPU, or 1]"
    )
    nodes: int = Field(
        default=1, ge=1, le=10**6, description="nodes of Slurm or Ray, over which the ranks are spread evenly"
    )
    least_nodes: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="nodes on which to continue when others are lost [default: all]",
    )
    launcher: Literal["local", "slurm", "ray"] | None = Field(
        default=None, description="what starts the ranks [default: slurm with several nodes, else local]"
    )
    restarts: int = Field(
        default=0, ge=0, le=10**6, description="maximum number of restarts after a rank fails"
    )
    run: str | None = Field(default=None, description="folder of the run [default: runs/TASK-TIME]")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="[default: CUDA where there is some]"
    )

    @model_validator(mode="after")
    def _names_are_of_one_line(self) -> Self:
        check_printable(self, "plan", "asked", "run")
        return self

    @model_validator(mode="after")
    def _least_nodes_need_restarts(self) -> Self:
        if self.least_nodes is not None and self.least_nodes > self.nodes:
            raise ValueError(
                f"--nodes {self.least_nodes}:{self.nodes}: the least number of nodes comes first, {self.nodes}:{self.least_nodes}"
            )
        if self.least_nodes is not None and self.least_nodes < self.nodes and not self.restarts:
            asked = f"--nodes {self.least_nodes}:{self.nodes}"
            raise ValueError(
                f"{asked} goes on with fewer nodes by starting the ranks again; say how often at most: --restarts 3"
            )
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether the ranks of several nodes are started again by an agent on each of them."""
        return self.nodes > 1 and self.restarts > 0


def load(path: Path | None, overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    """Spec and Launch from a TOML file, with dotted keys (`optimizer.lr`) on top; None takes a key back. Raises SpecError."""
    return _build_with(read_toml(path) if path is not None else {}, overrides)


def load_own(path: Path, overrides: Mapping[str, Any], edited: bool = False) -> tuple[Spec, Launch]:
    """The same from the request that `save` wrote for a run, which must be whole: no key may fall back to its default.

    edited: it was changed by hand; then its checksum is not compared, but every key with a default must be there. Raises SpecError."""
    tree = read_toml(path)
    if not edited and not _is_sealed(path.read_bytes()):
        raise SpecError(
            f"{path} is not what Paceline wrote there (its checksum in the last line is missing or differs); put the file back, "
            f"or if you edited it, accept it: paceline resume {path.parent} --edited"
        )
    request = _build_with(copy.deepcopy(tree), overrides)
    if edited and (missing := [key for key in _never_absent() if not _has(tree, key.split("."))]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SpecError(
            f"{path} lacks {missing[0]}{more}; a run's request has all its keys, which paceline train --keys lists"
        )
    return request


def _never_absent() -> list[str]:
    """Keys that `save` always writes: those whose default is not None."""
    kinds: tuple[type[BaseModel], ...] = (Launch, Spec)
    return [".".join(path) for kind in kinds for path, field in _leaves(kind) if field.default is not None]


def _leaves(kind: type[BaseModel]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """The keys of a table and of those within it."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from (((name, *path), leaf) for path, leaf in _leaves(field.annotation))
        else:
            yield (name,), field


def _has(tree: Any, path: list[str]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _build_with(tree: dict[str, Any], overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    for key, value in overrides.items():
        *parents, leaf = (
            key.split(".", 1) if not key.startswith("set.") else ("set", key.removeprefix("set."))
        )
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise SpecError(f"{name}={node!r} has no keys below it, got {key}")
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    return build(tree)


def read_toml(path: Path) -> dict[str, Any]:
    """Raises SpecError for what cannot be read, or is no TOML."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    except (ValueError, RecursionError):  # a number with thousands of digits, thousands of levels
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}") from None
    if is_too_large(tree):
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}")
    return tree


def build(tree: Mapping[str, Any]) -> tuple[Spec, Launch]:
    launch = {key: value for key, value in tree.items() if key in Launch.model_fields}
    spec = {key: value for key, value in tree.items() if key not in launch}
    try:
        return Spec.model_validate(spec), Launch.model_validate(launch)
    except ValidationError as error:
        raise SpecError(explain(error, KEYS)) from error


def save(path: Path, spec: Spec, launch: Launch) -> None:
    """Write what `load` and `load_own` read: on the disk when this returns."""
    tree = launch.model_dump(exclude_none=True) | spec.model_dump(exclude_none=True)
    with open(path, "wb") as file:
        file.write(_sealed(tomli_w.dumps(tree).encode()))
        file.flush()
        os.fsync(file.fileno())


SEAL = b"# checksum "


def _sealed(text: bytes) -> bytes:
    return text + SEAL + f"{zlib.crc32(text):08x}\n".encode()


def _is_sealed(content: bytes) -> bool:
    return content == _sealed(content[: max(content.rfind(SEAL), 0)])


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """`["width=64", "optimizer.eps=1e-6", "spec.threads=1"]` as keys for `load`.

    A plain name is a field of the task, a dotted one a key of the request, and `spec.` stands before those of its top level."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not all(key.split(".")):
            raise SpecError(f"--set {shown(item)} is not NAME=VALUE")
        name = key.removeprefix("spec.") if "." in key else f"set.{key}"
        value = parse_value(text, key)
        check_agree(key, "--set", found.get(name, value), "another --set", value)
        found[name] = value
    return found


def check_agree(key: str, one: str, value: Any, other: str, also: Any) -> None:
    """Raises SpecError where two places of a command line give a key two values."""
    are_nan = value != value and also != also
    if value != also and not are_nan:
        raise SpecError(
            f"{shown(key, str)} is {shown(value)} by {one} and {shown(also)} by {other}; give it once"
        )


def set_key(key: str) -> str:
    """The name by which `--set` reaches a key of the request: the inverse of `parse_overrides`."""
    return key if "." in key else f"spec.{key}"


def one_length(overrides: dict[str, Any]) -> dict[str, Any]:
    """With a length among the overrides, whichever length stood below is taken back."""
    asked = {key: overrides[key] for key in ("epochs", "steps") if key in overrides}
    return overrides if len(asked) != 1 else {"epochs": None, "steps": None} | overrides


def parse_value(text: str, key: str = "VALUE") -> Any:
    """A TOML value, or else the text itself: `64`, `1e-3`, `true`, `[1, 2]`, `relu`. Raises SpecError for one that TOML cannot hold."""
    try:
        read = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError):  # thousands of digits or levels
        raise SpecError(f"--set {shown(key, str)}={shown(text, str)}: {TOO_LARGE}") from None
    if is_too_large(read):
        raise SpecError(f"--set {shown(key, str)}={shown(text, str)}: {TOO_LARGE}")
    return (
        read["x"] if len(read) == 1 and isinstance(read["x"], (bool, int, float, str, list, dict)) else text
    )


TOO_LARGE = f"a number beyond 64 bits, or more than {DEEPEST} levels"


def is_too_large(value: Any, level: int = 0) -> bool:
    """Whether a number is not one of 64 bits, or the value has too many levels."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return level > DEEPEST or any(is_too_large(one, level + 1) for one in inner)
    return isinstance(value, int) and not -MOST - 1 <= value <= MOST


def shown(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """For a sentence: long values are cut."""
    text = as_text(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


def known_keys(kind: type[BaseModel]) -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in known_keys(field.annotation)]
    return keys


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the request that holds a value, as `--set` reaches it."""
    for kind in (Spec, Launch):
        yield from ((set_key(".".join(path)), field) for path, field in _leaves(kind) if path != ("set",))


KEYS = [*known_keys(Spec), *known_keys(Launch)]
TABLES = {key.partition(".")[0] for key in KEYS if "." in key} | {"set"}
SHORT = 20  # names that a sentence lists
NEAR = 0.65  # likeness by difflib: r and rr, bach and batch; not ema and betas


def explain(error: ValidationError, known: list[str], what: str = "key") -> str:
    """One sentence for the first thing that is wrong, with the nearest name for one that is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown {what} {shown(key, str)}{_nearest_key(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{what} {key} has no value; give it with --set {key}=VALUE"
    message = first["msg"].replace("Input should be", "must be")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)
    message = re.sub(r"a valid (?=[aeiou])", "an ", message).replace("a valid ", "a ")
    return f"{key} {message}, got {shown(first['input'])}"


def _nearest_key(key: str, known: list[str]) -> str:
    """Dotted names are compared within their table: `optimizer.ema` is not like `optimizer.eps` for what both begin with."""
    table, _, leaf = key.rpartition(".")
    if inside := [name.rpartition(".")[2] for name in known if table and name.rpartition(".")[0] == table]:
        return nearest(leaf, inside).replace("did you mean ", f"did you mean {table}.")
    found = nearest(key, known)
    return found if known is not KEYS or found.startswith("; did") else "; paceline train --keys lists them"


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean …?"` for a name that is spelt nearly so, or that is the end of a dotted one; else which ones there are."""
    known = list(known)
    ends = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    if near := ends or difflib.get_close_matches(name, known, 1, cutoff=NEAR):
        return f"; did you mean {near[0]}?"
    more = f" and {len(known) - SHORT} more" if len(known) > SHORT else ""
    return f"; there is {', '.join(known[:SHORT]) or 'none'}{more}"
