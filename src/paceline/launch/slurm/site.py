"""Site: what jobs must say at a computing centre, from its site.toml."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from paceline.errors import SpecError
from paceline.spec import Value, check_printable, explain, list_keys, read_toml

HERE = Path("site.toml")

NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
# Options of sbatch that would contradict what a job script of ours says: name, letter, what to do.
OURS = (
    (
        "array",
        "a",
        "its tasks would all train in one run folder; submit each training by itself, with a --run-dir of its own",
    ),
    ("nodes", "N", "leave it out, and say paceline submit --nodes"),
    ("ntasks", "n", "leave it out, and say paceline submit --ranks"),
    ("ntasks-per-node", "", "leave it out, and say paceline submit --ranks-per-node"),
    ("output", "o", "leave it out, and say log in site.toml"),
    ("signal", "", "leave it out, and say notice_s in site.toml"),
    ("open-mode", "", "leave it out; what a job logs is appended"),
    ("wrap", "", "leave it out; the job script is what trains"),
)
SHORTEST = len("--ar")  # below that names of several options begin alike, and sbatch refuses them
ALONE = "HhIkOQsvW"  # letters that take no value

Words = Annotated[tuple[str, ...], Field(strict=False)]


class Site(Value):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None  # of each node, in Slurm's words: gpu:a100:4
    gpus_per_node: int | None = Field(None, ge=1)
    cpus_per_rank: int | None = Field(None, ge=1)
    memory: str | None = None  # of each node, in Slurm's words: 64G
    modules: Words = ()
    conda: str | None = None  # an environment, by name or folder
    venv: str | None = None  # its folder
    container: str | None = None  # an image, for apptainer
    interface: str | None = None  # of the network between nodes: ib0
    scratch: str | None = None  # a fast folder of each node; variables count there: $TMPDIR
    stage_in: str | None = None  # a tar that is unpacked to scratch, once on each node
    log: str = "slurm-%j.out"  # in the run's folder, in Slurm's words
    notice_s: int = Field(120, ge=1)  # before the time limit a training is told to save and stop
    sbatch: Words = ()  # further options of sbatch: --exclusive
    environment: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        for names in (("conda", "venv", "container"), ("gres", "gpus_per_node")):
            said = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
            if len(said) > 1:
                raise ValueError(f"{' and '.join(said)} are two answers to one question; keep one")
        if self.stage_in is not None and self.scratch is None:
            raise ValueError(f"stage_in={self.stage_in!r} needs scratch, a folder to unpack it to")
        return self

    @model_validator(mode="after")
    def _lines_are_whole(self) -> Self:
        """A line of a job script must not become two."""
        check_printable(self, *type(self).model_fields)
        if bad := next((option for option in self.sbatch if not option.startswith("-")), None):
            raise ValueError(f"sbatch has options such as '--exclusive', got {bad!r}")
        if bad := next((variable for variable in self.environment if not NAME.fullmatch(variable)), None):
            raise ValueError(f"environment has names of variables, got {bad!r}")
        return self

    @model_validator(mode="after")
    def _options_are_not_ours(self) -> Self:
        for word in (word for option in self.sbatch for word in shlex.split(option)):
            for name, letter, fix in OURS:
                if _is_option(word, name, letter):
                    raise ValueError(f"sbatch has {word!r}, which is not for jobs of Paceline: {fix}")
        return self


def _is_option(word: str, name: str, letter: str) -> bool:
    """As sbatch reads it: a name may be cut short, and letters without a value may stand before one."""
    said = word.partition("=")[0]
    if said.startswith("--"):
        return len(said) >= SHORTEST and name.startswith(said[2:])
    return bool(letter) and re.match(f"-[{ALONE}]*{letter}", said) is not None


def read_site(path: Path | None) -> Site:
    """The site in a file. None: that of site.toml here, where there is one, else a site that asks for nothing. Raises SpecError."""
    if path is None and not HERE.exists():
        return Site()
    file = path or HERE
    try:
        return Site.model_validate(read_toml(file))
    except ValidationError as error:
        raise SpecError(f"{file}: {explain(error, list_keys(Site))}") from error
