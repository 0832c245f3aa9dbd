"""Which settings of two runs differ: the request, the start, the versions and the code of the task."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.events import Started
from paceline.run import RunFolder

WRITTEN_BY_PACELINE = ("chosen", "asked", "asked_ranks", "run")  # keys that describe how a request came about
STARTED = ("plan", "ranks", "device", "threads", "precision", "samples", "parameters")
ORIGIN = ("python", "git_revision", "git_changed", "processor")


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs.

    source  "request" (spec.toml), "start" (of the last start), "origin" (provenance.json) or "code"
    key     its name
    a, b    its values; None if it is not set
    """

    source: str
    key: str
    a: Any
    b: Any


def compare_settings(
    a: RunFolder, b: RunFolder, starts_a: list[Started], starts_b: list[Started]
) -> list[SettingDifference]:
    """Return the settings of the request, of the last start and of the origin that differ.

    Raises SpecError if a request is damaged.
    """
    requests = [_flatten_request(run) for run in (a, b)]
    differences = [*_compare("request", *requests)]
    seen = {difference.key for difference in differences}
    if starts_a and starts_b:
        starts = [{key: getattr(events[-1], key) for key in STARTED} for events in (starts_a, starts_b)]
        differences += [entry for entry in _compare("start", *starts) if entry.key not in seen]
    return [*differences, *_compare("origin", *(_flatten_origin(run) for run in (a, b)))]


def compare_code(a: Mapping[str, str], b: Mapping[str, str], prefix: str) -> list[SettingDifference]:
    """Return the methods of the task and the modules of the model that differ.

    a, b: identities of two checkpoints. `prefix`: of the keys that name code. The values are digests.
    """
    mine, other = (
        {key: text for key, text in identity.items() if key.startswith(prefix)} for identity in (a, b)
    )
    differences = [*_compare("code", mine, other)]
    if len(differences) > 1:  # the file differs because its methods do
        differences = [entry for entry in differences if not entry.key.endswith("file")]
    return differences


def _compare(source: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[SettingDifference]:
    for key in [*a, *(key for key in b if key not in a)]:
        if a.get(key) != b.get(key):
            yield SettingDifference(source, key, a.get(key), b.get(key))


def _flatten_request(run: RunFolder) -> dict[str, Any]:
    """Return the keys of a request with their values, those of tables as `optimizer.lr`."""
    spec, launch = run.request()
    tree = spec.model_dump(mode="json") | launch.model_dump(mode="json", exclude={*WRITTEN_BY_PACELINE})
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, dict) else {}
        flat |= {} if isinstance(value, dict) else {key: value}
    return flat


def _flatten_origin(run: RunFolder) -> dict[str, Any]:
    origin, _ = run.origin()
    packages = origin.get("packages")
    versions = packages if isinstance(packages, dict) else {}
    return {key: origin.get(key) for key in ORIGIN} | {
        f"version of {name}": number for name, number in versions.items()
    }
