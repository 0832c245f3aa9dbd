"""Parse and format bytes, seconds and counts."""

import pytest

from paceline.units import format_bytes, format_count, format_seconds, parse_bytes, parse_duration_s


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80 GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("512", 512),
        ("7 B", 7),
        (" 2 tib ", 2**41),
        ("0", 0),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80 GiG", "eighty", "-1 GB", "1 2", "1,5 GB", "1.2.3 GB", "."])
def test_invalid_bytes_are_refused(text):
    with pytest.raises(
        ValueError, match=r"is not a number of bytes; write it as '80 GiB' or '500 MB'"
    ) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**50, "3072.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1, 1000, 2**20, 3 * 2**29, 5 * 2**40])
def test_bytes_round_trip(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000042, "4.2 µs"),
        (0.0042, "4.2 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (75, "1:15"),
        (7384, "2:03:04"),
        (3600, "1:00:00"),
        (0, "0.0 ms"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1234567, "1.23 M"),
        (999, "999"),
        (1000, "1 k"),
        (151_000, "151 k"),
        (7e9, "7 G"),
        (1.2e12, "1.2 T"),
        (0.5, "0.5"),
    ],
)
def test_format_count(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("1h30m", 5400), ("1.5h", 5400), ("2d", 172800), ("45s", 45), ("1d1s", 86401)],
)
def test_parse_duration(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "0s", "-1h", "30m1h", "1 h", "h", "1h30", "nan", "\u0661h"])
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_s(text)
