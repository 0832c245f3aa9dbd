"""Site: the settings that jobs need at a computing centre, from its site.toml."""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.errors import SpecError
from paceline.spec import Value, check_printable, describe_error, list_keys, read_toml

DEFAULT_FILE = Path("site.toml")

NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Options of sbatch that would contradict the job script of Paceline: name, letter, fix.
RESERVED_OPTIONS = (
    (
        "array",
        "a",
        "its tasks would all train in one run folder; leave it out, and use paceline submit --array "
        "seed=1..8",
    ),
    ("nodes", "N", "leave it out, and use paceline submit --nodes"),
    ("ntasks", "n", "leave it out, and use paceline submit --ranks"),
    ("ntasks-per-node", "", "leave it out, and use paceline submit --ranks-per-node"),
    ("output", "o", "leave it out, and set log in site.toml"),
    ("signal", "", "leave it out, and set notice_s in site.toml"),
    ("open-mode", "", "leave it out; the log of a job is always appended"),
    ("wrap", "", "leave it out; the job script starts the training"),
)
SHORTEST = len("--ar")  # sbatch refuses shorter abbreviations, since they are ambiguous
FLAGS = "HhIkOQsvW"  # letters of options without a value

Words = Annotated[tuple[str, ...], Field(strict=False)]


class Site(Value):
    """Settings of the jobs of a computing centre. Every key is optional."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gres: str | None = None  # per node, in the syntax of Slurm: gpu:a100:4
    gpus_per_node: int | None = Field(None, ge=1)
    cpus_per_rank: int | None = Field(None, ge=1)
    memory: str | None = None  # per node, in the syntax of Slurm: 64G
    modules: Words = ()
    setup: Words = ()  # lines of bash after the modules: source set_vars.sh
    conda: str | None = None  # name or folder of an environment
    venv: str | None = None  # folder of a virtual environment
    container: str | None = None  # image, or its address for pyxis and podman
    runtime: Literal["apptainer", "pyxis", "podman"] = "apptainer"  # that starts the container
    interface: str | None = None  # network interface between nodes: ib0
    scratch: str | None = None  # fast folder of each node, with shell variables: $TMPDIR
    stage_in: str | None = None  # tar file that is unpacked to scratch, once on each node
    backups: Words | None = None  # folders that are backed up, with variables: $HOME; None: unknown
    log: str = "slurm-%j.out"  # file in the run folder, in the syntax of Slurm
    notice_s: int = Field(120, ge=1)  # how long before the time limit a training must save and stop
    sbatch: Words = ()  # further options of sbatch: --exclusive
    environment: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for names in (("conda", "venv", "container"), ("gres", "gpus_per_node")):
            settings = [
                f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None
            ]
            if len(settings) > 1:
                raise ValueError(f"{' and '.join(settings)} exclude each other; keep only one")
        if self.runtime != "apptainer" and self.container is None:
            raise ValueError(f"runtime={self.runtime!r} requires container, the image that it starts")
        if self.stage_in is not None and self.scratch is None:
            raise ValueError(f"stage_in={self.stage_in!r} requires scratch, the folder to unpack it to")
        return self

    @model_validator(mode="after")
    def _lines_are_whole(self) -> Self:
        """Raise ValueError for a value that would break a line of a job script in two."""
        check_printable(self, *type(self).model_fields)
        texts = {name: getattr(self, name) for name in type(self).model_fields}
        if bad := next((name for name, text in texts.items() if text == "" or "" in _list(text)), None):
            raise ValueError(f"{bad} must not be empty; leave it out")
        if "/" in self.log or self.log in (".", ".."):
            raise ValueError(f"log must be the name of a file in the run folder, got {self.log!r}")
        if self.container is not None and not re.match(r"[\w./~]", self.container):
            raise ValueError(f"container must be a file or an address, got {self.container!r}")
        if bad := next((option for option in self.sbatch if not option.startswith("-")), None):
            raise ValueError(f"sbatch must be options such as '--exclusive', got {bad!r}")
        if bad := next((variable for variable in self.environment if not NAME.fullmatch(variable)), None):
            raise ValueError(f"environment must have names of variables, got {bad!r}")
        return self

    @model_validator(mode="after")
    def _options_are_not_reserved(self) -> Self:
        words = []
        for option in self.sbatch:
            try:
                words += shlex.split(option)
            except ValueError as error:
                raise ValueError(f"sbatch has {option!r} with an open quotation mark; close it") from error
        for word in words:
            for name, letter, fix in RESERVED_OPTIONS:
                if _is_option(word, name, letter):
                    raise ValueError(
                        f"sbatch has {word!r}, which conflicts with the job script of Paceline; {fix}"
                    )
        return self

    @model_validator(mode="after")
    def _backups_are_folders(self) -> Self:
        if bad := next((folder for folder in self.backups or () if folder[:1] not in ("/", "$")), None):
            raise ValueError(f"backups must be absolute folders such as '$HOME' or '/store', got {bad!r}")
        return self

    def is_backed_up(self, path: Path) -> bool | None:
        """Return whether a path is in a folder with backups; None if the site does not say."""
        if self.backups is None:
            return None
        folders = [os.path.expandvars(folder) for folder in self.backups]
        return any(path.resolve().is_relative_to(Path(each).resolve()) for each in folders if "$" not in each)


def _list(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _is_option(word: str, name: str, letter: str) -> bool:
    """Return whether sbatch takes a word for this option.

    Names may be abbreviated; flags may precede a letter.
    """
    option = word.partition("=")[0]
    if option.startswith("--"):
        return len(option) >= SHORTEST and name.startswith(option[2:])
    return bool(letter) and re.match(f"-[{FLAGS}]*{letter}", option) is not None


def read_site(path: Path | None) -> Site:
    """Return the site of a file, by default of site.toml in this folder, or an empty site without it.

    Raises SpecError.
    """
    if path is None and not DEFAULT_FILE.exists():
        return Site()
    file = path or DEFAULT_FILE
    try:
        return Site.model_validate(read_toml(file))
    except ValidationError as error:
        raise SpecError(f"{file}: {describe_error(error, list_keys(Site))}") from error
