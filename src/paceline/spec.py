"""What is wanted of a training: frozen values, read from TOML, overridden by `key=value`; nothing is repaired in silence."""

import copy
import difflib
import os
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from paceline.errors import SpecError

DEFAULT_EPOCHS = 20


class Value(BaseModel):
    """Frozen, comparable, strict: an unknown key and a wrong type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Decay = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Value):
    """Defaults are torch's, but that `lr` of SGD is asked for in the same field."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)  # sgd
    nesterov: bool = False  # sgd
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), strict=False)  # adamw
    eps: float = Field(1e-8, gt=0)  # adamw
    clip: float | None = Field(None, gt=0)  # largest norm of the whole gradient

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0, got momentum=0.0")
        return self


class Schedule(Value):
    """Factor on the learning rate, counted in samples, so that it does not depend on ranks or micro-batches."""

    name: Literal["constant", "cosine", "linear", "step"] = "constant"
    warmup: int = Field(0, ge=0)  # samples of linear warm-up
    floor: float = Field(0.0, ge=0, le=1)  # cosine, linear: the factor at the end
    every: int | None = Field(None, gt=0)  # step: samples between two decays
    factor: float = Field(0.1, gt=0, le=1)  # step

    @model_validator(mode="after")
    def _step_needs_every(self) -> Self:
        if (self.name == "step") != (self.every is not None):
            raise ValueError(
                f"schedule.every (samples between two decays) belongs to name='step', got name={self.name!r}, every={self.every}"
            )
        return self


class Save(Value):
    """When to write checkpoints, besides the one at the end, and which to keep."""

    every: int | None = Field(None, gt=0)  # steps
    minutes: float = Field(10.0, gt=0, allow_inf_nan=True)  # inf: never
    keep: int = Field(2, ge=1)  # the last so many, and the best
    best: str = "min loss"  # of the evaluation

    @model_validator(mode="after")
    def _best_is_a_direction(self) -> Self:
        if not re.fullmatch(r"(min|max) \S+", self.best):
            raise ValueError(f"save.best must be 'min NAME' or 'max NAME', got {self.best!r}")
        return self


class Loading(Value):
    """How each rank reads its samples."""

    workers: int | None = Field(None, ge=0)  # processes a rank; None: spare cores on a machine with GPUs, else 0
    prefetch: int = Field(2, ge=1)  # batches ahead, each worker


class Spec(Value):
    """What is wanted: task, global batch, length, optimizer, schedule, seed, precision."""

    task: str = "digits"  # a built-in name, "path/to/file.py:Class" or "package.module:Class"
    set: dict[str, Any] = {}  # fields of the task: its hyper-parameters
    batch: int = Field(64, ge=1)  # samples of the global batch; the plan decides how it is split
    epochs: float | None = Field(None, gt=0)
    steps: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    tf32: bool = False  # let CUDA round the inputs of float32 products to TF32
    compile: bool = False
    batch_norm: Literal["global", "local"] = "global"  # whose samples it takes its statistics from: of all ranks, or of each rank
    evaluate_every: int | None = Field(None, ge=1)  # steps; None: after each epoch and at the end
    threads: int | None = Field(None, ge=1)  # of torch on each rank; None: the cores divided by the ranks of this machine
    account: bool | None = None  # profile some steps for `paceline account`; None: as often as 1 % of the time allows
    timeout_s: float = Field(60.0, gt=0)  # after which a rank gives up waiting for another; until all have made a step, at least 600
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    save: Save = Save()
    data: Loading = Loading()

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs={self.epochs:g} and steps={self.steps} are two lengths of one training; say one of them")
        return self

    def total_steps(self, samples: int) -> int:
        """Steps until done, when an epoch has `samples`. Batches run across epochs, so only the last one goes over the end."""
        if self.steps is not None:
            return self.steps
        return max(1, -(-round((self.epochs or DEFAULT_EPOCHS) * samples) // self.batch))


class Launch(Value):
    """How the ranks are started; in a TOML file these keys stand beside those of Spec."""

    plan: str | None = None  # None: single on one rank, else ddp; auto: the fastest that fits
    chosen: str | None = None  # why this plan, where Paceline took it
    asked: str | None = None  # the plan that was asked for, where another one was taken: auto, or one that is not for these ranks
    asked_ranks: int | None = Field(None, ge=1)  # for which it was asked
    ranks: int | None = Field(None, ge=1)  # None: one a GPU, or one
    nodes: int = Field(1, ge=1)  # of a Slurm allocation or of Ray, over which the ranks are spread alike
    least_nodes: int | None = Field(None, ge=1)  # on which to go on when others are lost; None: all
    launcher: Literal["local", "slurm", "ray"] | None = None  # None: slurm where there are several nodes, else local
    restarts: int = Field(0, ge=0)  # after a rank died, from the last checkpoint
    run: str | None = None  # folder; None: runs/TASK-TIME
    device: Literal["cpu", "cuda"] | None = None  # None: CUDA where there is some

    @model_validator(mode="after")
    def _least_nodes_need_restarts(self) -> Self:
        if self.least_nodes is not None and self.least_nodes > self.nodes:
            raise ValueError(
                f"--nodes {self.least_nodes}:{self.nodes}: the least number of nodes comes first, {self.nodes}:{self.least_nodes}"
            )
        if self.least_nodes is not None and self.least_nodes < self.nodes and not self.restarts:
            asked = f"--nodes {self.least_nodes}:{self.nodes}"
            raise ValueError(f"{asked} goes on with fewer nodes by starting the ranks again; say how often at most: --restarts 3")
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
        raise SpecError(f"{path} lacks {missing[0]}{more}; a run's request has all its keys, which paceline train --keys lists")
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
        *parents, leaf = key.split(".", 1) if not key.startswith("set.") else ("set", key.removeprefix("set."))
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
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error


def build(tree: Mapping[str, Any]) -> tuple[Spec, Launch]:
    launch = {key: value for key, value in tree.items() if key in Launch.model_fields}
    spec = {key: value for key, value in tree.items() if key not in launch}
    try:
        return Spec.model_validate(spec), Launch.model_validate(launch)
    except ValidationError as error:
        raise SpecError(explain(error, [*known_keys(Spec), *Launch.model_fields])) from error


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
    """`["width=64", "optimizer.eps=1e-6"]` as keys for `load`: a plain name is a field of the task."""
    found = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise SpecError(f"--set {item!r} is not NAME=VALUE")
        found[key if "." in key else f"set.{key}"] = parse_value(text)
    return found


def one_length(overrides: dict[str, Any]) -> dict[str, Any]:
    """With a length among the overrides, whichever length stood below is taken back."""
    asked = {key: overrides[key] for key in ("epochs", "steps") if key in overrides}
    return overrides if len(asked) != 1 else {"epochs": None, "steps": None} | overrides


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself: `64`, `1e-3`, `true`, `[1, 2]`, `relu`."""
    try:
        read = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["x"] if len(read) == 1 and isinstance(read["x"], (bool, int, float, str, list, dict)) else text


def known_keys(kind: type[BaseModel]) -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [f"{name}.{key}" for key in known_keys(field.annotation)]
    return keys


def explain(error: ValidationError, known: list[str], what: str = "key") -> str:
    """One sentence for the first thing that is wrong, with the nearest name for one that is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown {what} {key}{nearest(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{what} {key} has no value; give it with --set {key}=VALUE"
    message = first["msg"].replace("Input should be", "must be")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)
    message = re.sub(r"a valid (?=[aeiou])", "an ", message).replace("a valid ", "a ")
    return f"{key} {message}, got {first['input']!r}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean …?"`, or what there is when nothing is near."""
    known = list(known)
    if near := difflib.get_close_matches(name, known, 1, cutoff=0.5):
        return f"; did you mean {near[0]}?"
    ends = [key for key in known if key.split(".")[-1] == name]
    return f"; did you mean {ends[0]}?" if ends else f"; there is {', '.join(known) or 'none'}"
