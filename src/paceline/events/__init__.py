"""Events: what happened in a run, one JSON object per line. Observers of a run read nothing else.

A line has `time` (seconds since the epoch), `event` (started, step, noted, profiled, noisemeasured,
evaluated, saved, failed, stalled or ended) and the fields of that event. Fast steps are written about ten
times a second, several at once, so that other events may precede a step that ended earlier. A run that was
interrupted and resumed repeats the steps after its last checkpoint: the later line counts.
"""

from paceline.events.from_end import end, last, tail
from paceline.events.json_lines import MAX_TIME, dumps, loads, nan_to_null
from paceline.events.kinds import (
    KINDS,
    Ended,
    Evaluated,
    Event,
    Failed,
    NoiseMeasured,
    Noted,
    Profiled,
    Saved,
    Stalled,
    Started,
    Step,
    describe_metric,
)
from paceline.events.lines import Skipped
from paceline.events.reader import EventReader, follow, read, readable
from paceline.events.writer import EventWriter, append

__all__ = [
    "KINDS",
    "MAX_TIME",
    "Ended",
    "Evaluated",
    "Event",
    "EventReader",
    "EventWriter",
    "Failed",
    "NoiseMeasured",
    "Noted",
    "Profiled",
    "Saved",
    "Skipped",
    "Stalled",
    "Started",
    "Step",
    "append",
    "describe_metric",
    "dumps",
    "end",
    "follow",
    "last",
    "loads",
    "nan_to_null",
    "read",
    "readable",
    "tail",
]
