"""Read sample files of Paceline and recordings of nvidia-smi."""

import csv
import math
import random
import re
import subprocess
from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.monitor.columns import COLUMNS, THROTTLE_REASONS, kind_of, throttle_reasons
from paceline.monitor.samples import FilePosition, read_samples

HEAD = """# paceline samples 1
# node: node17
# cpu: 2 of 4 cores: 0-1
# absent: gpu: nvidia-ml-py is not installed (pip install paceline[gpu])
time [s],cpu [%],memory used [MiB],rank0 cpu [%]
"""
SMI = """timestamp, index, name, utilization.gpu [%], memory.used [MiB], power.draw [W], fan.speed [%]
2024/05/01 12:00:00.100, 0, NVIDIA H100 80GB HBM3, 81 %, 2758 MiB, 145.93 W, [N/A]
2024/05/01 12:00:00.103, 1, NVIDIA H100 80GB HBM3, 0 %, 4 MiB, [Not Supported], [N/A]
2024/05/01 12:00:01.100, 0, NVIDIA H100 80GB HBM3, 83 %, 2758 MiB, 150.00 W, [N/A]
2024/05/01 12:00:01.103, 1, NVIDIA H100 80GB HBM3, 0 %, 4 MiB, 70.50 W, [N/A]
"""


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def values(column):
    """Return a column as a list in which None is missing, which can be compared."""
    return [None if math.isnan(value) else value for value in column]


def test_columns_units_and_comments(tmp_path):
    path = write(tmp_path / "a.csv", HEAD + "100.5,10,20,30\n101.5,11,,31.5\n102.5,12,22,\n")
    samples = read_samples(path)
    assert list(samples.time) == [100.5, 101.5, 102.5]
    assert {name: values(column) for name, column in samples.columns.items()} == {
        "cpu": [10, 11, 12],
        "memory used": [20, None, 22],
        "rank0 cpu": [30, 31.5, None],
    }
    assert samples.units["memory used"] == "MiB"
    assert samples.node == "node17"
    assert samples.comments["cpu"] == "2 of 4 cores: 0-1"
    assert samples.absent == {"gpu": "nvidia-ml-py is not installed (pip install paceline[gpu])"}
    assert (samples.sections, samples.damaged, samples.notes) == ([0], 0, [])
    assert (samples.numbers("rank"), samples.numbers("gpu"), samples.interval_s) == ([0], [], 1)
    assert samples.values("memory used") == [20, 22]
    assert samples.values("no such column") == []


def test_a_half_written_line_is_left_for_later(tmp_path):
    path = write(tmp_path / "a.csv", HEAD + "100,1,2,3\n101,1,2,3")
    first = read_samples(path)
    assert list(first.time) == [100]
    with path.open("a") as file:
        file.write("3\n102,7,8,9\n")
    second = read_samples(path, first.position)
    assert list(second.time) == [101, 102]
    assert values(second["rank0 cpu"]) == [33, 9]
    assert (second.node, second.damaged, second.sections) == ("node17", 0, [])
    third = read_samples(path, second.position)
    assert len(third) == 0
    assert third.position == FilePosition(path.stat().st_size, 0, samples=3)


@pytest.mark.parametrize(
    "line",
    [
        "101,1,2\n",
        "101,1,2,3,4\n",
        "101,1,2,three\n",
        "101,1,2,nan\n",
        "101,1,2,inf\n",
        "101,1,2,1e3\n",
        "101,1,2,1.2.3\n",
        ",1,2,3\n",
        "-5,1,2,3\n",
        "101,1,2," + "9" * 400 + "\n",
        "9" * 29 + ",1,2,3\n",
        "\n",
        "101,1,\x00,3\n",
        "101,1,2,3" + " " * 3_000_000 + "\n",
    ],
)
def test_damaged_lines_are_counted_and_skipped(tmp_path, line):
    path = write(tmp_path / "a.csv", HEAD + "100,1,2,3\n" + line + "102,4,5,6\n")
    samples = read_samples(path)
    assert list(samples.time) == [100, 102]
    assert values(samples["rank0 cpu"]) == [3, 6]
    assert samples.damaged == 1


def test_sections_with_other_columns(tmp_path):
    again = HEAD.replace("rank0 cpu [%]", "gpu0 power [W]").replace("# absent: gpu:", "# absent: swap:")
    path = write(
        tmp_path / "a.csv", HEAD + "100,1,2,3\n" + again + "200,4,5,6\n" + HEAD + "300,7,8,9\n301,7,8,9\n"
    )
    samples = read_samples(path)
    assert samples.sections == [0, 1, 2]
    assert values(samples["rank0 cpu"]) == [3, None, 9, 9]
    assert values(samples["gpu0 power"]) == [None, 6, None, None]
    assert list(samples.absent) == ["gpu"]
    assert samples.interval_s == 1  # the time between sections does not count


def test_columns_that_change_within_a_section(tmp_path):
    path = write(tmp_path / "a.csv", HEAD + "100,1,2,3\ntime [s],cpu [%]\n101,4\n")
    samples = read_samples(path)
    assert values(samples["cpu"]) == [1, 4]
    assert values(samples["rank0 cpu"]) == [3, None]
    with path.open("a") as file:
        file.write("102,5\n")
    assert values(read_samples(path, samples.position)["cpu"]) == [5]


def test_a_file_read_in_pieces_equals_the_whole(tmp_path):
    """Compare with csv and float on lines that are appended in random pieces, also within a line."""
    draw = random.Random(4)
    text = ""
    rows = []
    for section in range(3):
        text += HEAD
        for row in range(draw.randrange(20)):
            cells = [f"{1000 * section + row}.{draw.randrange(1000):03}"]
            cells += [draw.choice(["", f"{draw.uniform(-9, 9):.2f}"]) for _ in range(3)]
            rows.append(cells)
            text += ",".join(cells) + "\n"
    data = text.encode()
    path = write(tmp_path / "a.csv", b"")
    position, parts, at = None, [], 0
    while at < len(data):
        at = min(len(data), at + draw.randrange(1, 90))
        write(path, data[:at])
        parts.append(read_samples(path, position))
        position = parts[-1].position
    for number, name in ((1, "cpu"), (2, "memory used"), (3, "rank0 cpu")):
        expected = [float(cells[number]) if cells[number] else None for cells in rows]
        assert [value for part in parts for value in values(part.columns.get(name, []))] == expected
        assert values(read_samples(path)[name]) == expected
    assert sum(len(part.sections) for part in parts) == len(read_samples(path).sections)
    assert not any(part.damaged for part in parts)


def test_parts_of_limited_size(tmp_path):
    path = write(tmp_path / "a.csv", HEAD + "".join(f"{100 + row},1,2,3\n" for row in range(10_000)) + HEAD)
    position, times = None, []
    for _ in range(10):
        part = read_samples(path, position, max_samples=1000, only=lambda name: name == "cpu")
        assert set(part.columns) <= {"cpu"}
        times += part.time
        position = part.position
    assert times == list(range(100, 10_100))


def test_a_replaced_file_is_read_from_its_beginning(tmp_path):
    path = write(tmp_path / "a.csv", HEAD + "100,1,2,3\n101,1,2,3\n")
    position = read_samples(path).position
    write(path, HEAD + "200,1,2,3\n")
    samples = read_samples(path, position)
    assert (list(samples.time), samples.restarted) == ([200], True)


def test_clock_of_the_node(tmp_path):
    path = write(tmp_path / "a.csv", HEAD.replace("time", "# clock ahead [s]: 40\ntime", 1) + "140,1,2,3\n")
    samples = read_samples(path)
    assert list(samples.time) == [100]
    assert samples.notes == [
        "the clock of node17 is 40 s ahead of that of the file system; times are corrected"
    ]


def test_a_newer_version_is_read_with_a_note(tmp_path):
    text = HEAD.replace("samples 1", "samples 7").replace("rank0 cpu [%]", "fusion [PW]")
    samples = read_samples(write(tmp_path / "a.csv", text + "100,1,2,3\n"))
    assert (values(samples["fusion"]), samples.units["fusion"]) == ([3], "PW")
    assert samples.notes == ["written by another version of Paceline: paceline samples 7"]


def test_control_characters_do_not_reach_a_terminal(tmp_path):
    text = HEAD.replace("node17", "a\x1b[2Jb").replace("rank0 cpu", "x\x1b]0;y")
    samples = read_samples(write(tmp_path / "a.csv", text + "100,1,2,3\n"))
    assert "\x1b" not in samples.node + "".join(samples.columns) + "".join(samples.units)


def test_recording_of_nvidia_smi(tmp_path):
    samples = read_samples(write(tmp_path / "gpu.csv", SMI))
    noon = float(subprocess.run(["date", "-d", "2024-05-01 12:00:00", "+%s"], capture_output=True).stdout)
    assert [at - noon for at in samples.time] == pytest.approx([0.1, 1.1], abs=1e-6)
    assert {name: values(column) for name, column in samples.columns.items()} == {
        "gpu0 utilization": [81, 83],
        "gpu1 utilization": [0, 0],
        "gpu0 memory used": [2758, 2758],
        "gpu1 memory used": [4, 4],
        "gpu0 power": [145.93, 150],
        "gpu1 power": [None, 70.5],
        "gpu0 fan": [None, None],
        "gpu1 fan": [None, None],
    }
    assert samples.units["gpu1 power"] == "W"
    assert samples.comments == {"gpu0": "NVIDIA H100 80GB HBM3", "gpu1": "NVIDIA H100 80GB HBM3"}
    assert samples.absent == {f"gpu{gpu} fan": "nvidia-smi reported no value" for gpu in (0, 1)}
    assert (samples.source, samples.has_clock, samples.damaged, samples.sections) == (
        "nvidia-smi",
        True,
        0,
        [0],
    )


def without(fields, units=True):
    """Return the recording without some fields, or without units in its values (the option nounits)."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(SMI.splitlines())]
    kept = [number for number, name in enumerate(rows[0]) if name.partition(" ")[0] not in fields]
    lines = [[row[number] for number in kept] for row in rows]
    if not units:
        lines[1:] = [
            [cell.removesuffix(" %").removesuffix(" MiB").removesuffix(" W") for cell in line]
            for line in lines[1:]
        ]
    return "".join(", ".join(line) + "\n" for line in lines)


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("timestamp",),
        ("index",),
        ("name", "memory.used", "fan.speed"),
        ("timestamp", "name", "power.draw"),
    ],
)
def test_any_choice_of_fields(tmp_path, fields, units):
    """A recording without some fields has the columns of the others, with equal values."""
    whole = read_samples(write(tmp_path / "a.csv", SMI))
    part = read_samples(write(tmp_path / "b.csv", without(fields, units)))
    names = {"memory.used": "memory used", "power.draw": "power", "fan.speed": "fan"}
    dropped = [names[field] for field in fields if field in names]
    assert {name: values(column) for name, column in part.columns.items()} == {
        name: values(column)
        for name, column in whole.columns.items()
        if name.partition(" ")[2] not in dropped
    }
    assert part.has_clock == ("timestamp" not in fields)
    assert list(part.time) == (list(whole.time) if part.has_clock else [0, 1])
    assert any("add index to --query-gpu" in note for note in part.notes) == ("index" in fields)


def test_recording_of_one_gpu_without_index(tmp_path):
    lines = [f"2024/05/01 12:00:{second:02}.5{second:02}, {second} %\n" for second in range(20)]
    samples = read_samples(write(tmp_path / "a.csv", "timestamp, utilization.gpu [%]\n" + "".join(lines)))
    assert list(samples.columns) == ["gpu0 utilization"]
    assert values(samples["gpu0 utilization"]) == list(range(20))


def test_recording_with_uuids_and_throttle_reasons(tmp_path):
    text = (
        "uuid, clocks_throttle_reasons.sw_power_cap, clocks_throttle_reasons.hw_thermal_slowdown, pstate,"
        " memory.free [MiB], memory.total [MiB], driver_version, retired_pages.sbe\n"
        "GPU-b, Active, Active, P0, 10 MiB, 100 MiB, 550.1, 0\n"
        "GPU-a, Not Active, Not Active, P8, 90 MiB, 100 MiB, 550.1, 0\n"
        "GPU-b, Not Active, Active, P2, 20 MiB, 100 MiB, 550.1, 0\n"
        "GPU-a, [N/A], Not Active, P8, [GPU is lost], 100 MiB, 550.1, 0\n"
    )
    samples = read_samples(write(tmp_path / "a.csv", text))
    assert [throttle_reasons(bits) for bits in samples["gpu0 throttle"]] == [
        ["power cap", "hardware thermal slowdown"],
        ["hardware thermal slowdown"],
    ]
    assert values(samples["gpu1 throttle"]) == [0, 0]
    assert values(samples["gpu0 memory used"]) == [90, 80]
    assert values(samples["gpu1 memory used"]) == [10, None]
    assert values(samples["gpu0 state"]) == [0, 2]
    assert samples.ignored == ("retired_pages.sbe",)


def test_throttle_reasons_as_one_number(tmp_path):
    text = "index, clocks_throttle_reasons.active\n0, 0x0000000000000044\n"
    assert throttle_reasons(read_samples(write(tmp_path / "a.csv", text))["gpu0 throttle"][0]) == [
        "power cap",
        "hardware thermal slowdown",
    ]


def test_a_recording_that_grows(tmp_path):
    path = tmp_path / "a.csv"
    position, seen = FilePosition(0, 0), []
    for end in range(0, len(SMI) + 1, 7):
        write(path, SMI[:end])
        if "\n" not in SMI[:end]:
            continue
        part = read_samples(path, position)
        position = part.position
        seen += [list(row) for row in zip(part.time, part.columns.get("gpu1 utilization", []), strict=False)]
    write(path, SMI)
    part = read_samples(path, position)
    seen += [list(row) for row in zip(part.time, part.columns.get("gpu1 utilization", []), strict=False)]
    whole = read_samples(path)
    assert seen == [list(row) for row in zip(whole.time, whole["gpu1 utilization"], strict=True)]


@pytest.mark.parametrize(
    "line",
    [
        "2024/05/01 12:00:02.100, 0, NVIDIA H100 80GB HBM3, 81 %, 2758 MiB",
        "2024/05/01 12:00:02.100, 0, NVIDIA H100 80GB HBM3, 81 %, 2758 GiB, 1 W, [N/A]",
        "2024/05/01 12:00:02.100, 0, NVIDIA H100 80GB HBM3, much, 2758 MiB, 1 W, [N/A]",
        "2024/15/01 12:00:02.100, -1, NVIDIA H100 80GB HBM3, 81 %, 2758 MiB, 1 W, [N/A]",
        "yesterday, 0, NVIDIA H100 80GB HBM3, 81 %, 2758 MiB, 1 W, [N/A]",
        "2024/05/01 12:00:02.100, 99999999, NVIDIA H100 80GB HBM3, 81 %, 2758 MiB, 1 W, [N/A]",
        "Unable to determine the device handle for GPU 0000:41:00.0: GPU is lost.  Reboot the system",
    ],
)
def test_damaged_lines_of_a_recording_are_counted(tmp_path, line):
    samples = read_samples(write(tmp_path / "a.csv", SMI + line + "\n"))
    assert (len(samples), samples.damaged) == (2, 1)


@pytest.mark.parametrize("text", ["epoch,loss\n1,2\n", "0, 81 %, 2758 MiB\n", "\x00\xff\n", "{}\n"])
def test_other_files_are_refused_in_one_sentence(tmp_path, text):
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(RunError, match=r"has no known column in its first line .*utilization\.gpu") as caught:
        read_samples(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(RunError, match=r"cannot read .*: No such file or directory"):
        read_samples(tmp_path / "a.csv")
    with pytest.raises(RunError, match="it is not a regular file"):
        read_samples(tmp_path)


def test_an_empty_file_has_no_samples(tmp_path):
    samples = read_samples(write(tmp_path / "a.csv", ""))
    assert (len(samples), samples.columns, samples.interval_s, samples.duration_s) == (0, {}, None, None)


def test_kinds_of_columns():
    assert kind_of("gpu12 memory used") == "gpuN memory used"
    assert kind_of("cpu3") == "cpuN"
    assert kind_of("cpu energy") == "cpu energy"
    assert kind_of("rank0 workers cpu") == "rankN workers cpu"
    assert {kind_of(name.replace("N", "7", 1)) for name in COLUMNS} == set(COLUMNS)


def test_the_page_lists_all_columns():
    page = (Path(__file__).parents[2] / "docs/files.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` +\| (.*?) *\| (.+?) *\|$", page, re.M)
    for column in COLUMNS.values():
        assert (column.name, column.unit, column.meaning) in rows
    for name, bit in THROTTLE_REASONS.items():
        assert f"{bit} {name}" in page.replace("\n", " ")
