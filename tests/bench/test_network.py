"""Collectives over links with known rate and delay: network namespaces, shaped by the kernel."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import network

pytestmark = [pytest.mark.slow, pytest.mark.network]
PORT = 29477
TRIES = 3  # other programs on the machine make a link slower, never faster


def measured(nodes: Sequence[network.Node], ranks_on_each: int, *words: str, at: Path) -> list[dict]:
    """Rows of `bench collectives`, whose ranks run on these nodes."""
    command = [sys.executable, "-m", "paceline", "bench", "collectives", *words, "--json", "found.json"]
    network.succeed(network.start_ranks(nodes, command, at, PORT, ranks_on_each), timeout_s=200)
    return json.loads((at / "found.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("rate", "rate_Bps", "size"),
    [("100mbit", 12.5e6, "2MiB"), ("1gbit", 125e6, "16MiB")],
)
def test_busbw_follows_the_rate_of_the_links(rate, rate_Bps, size, tmp_path):
    with network.nodes(4, rate=rate) as nodes:
        for _ in range(TRIES):
            (row,) = measured(
                nodes,
                1,
                "--operations",
                "all-reduce",
                "--sizes",
                size,
                "--seconds",
                "1",
                "--axes",
                "across",
                at=tmp_path,
            )
            assert (row["ranks"], row["spans"], row["wrong"]) == (4, "across", 0)
            share = row["busbw_GBps"] * 1e9 / rate_Bps
            assert share < 1.15
            if share > 0.85:
                return
        raise AssertionError(f"busbw is {share:.0%} of {rate}")


def test_collectives_within_nodes_are_faster_than_across(tmp_path):
    with network.nodes(2, rate="100mbit") as nodes:
        rows = measured(
            nodes, 2, "--operations", "all-reduce", "--sizes", "1MiB", "--axes", "node,across", at=tmp_path
        )
    busbw = {row["axis"]: row["busbw_GBps"] for row in rows}
    assert {(row["axis"], row["spans"], row["ranks"], row["groups"]) for row in rows} == {
        ("node", "node", 2, 2),
        ("across", "across", 2, 2),
    }
    assert busbw["across"] < 1.15 * 0.0125 / 2  # two pairs share a link
    assert busbw["node"] > 2 * busbw["across"]


def test_alpha_follows_the_delay_of_the_links(tmp_path):
    """Compare α for delays that differ by 2 ms.

    gloo sends a message when the receiver has reported that it is ready, which takes two delays. An
    all-reduce of two ranks takes two messages of this kind.
    """
    for _ in range(TRIES):
        alphas = {delay_ms: _alphas(delay_ms, tmp_path) for delay_ms in (1.0, 3.0)}
        added_s = {name: alphas[3.0][name] - alphas[1.0][name] for name in alphas[1.0]}
        is_near = 2e-3 < alphas[1.0]["send-recv"] < 4e-3
        if is_near and 3.6e-3 < added_s["send-recv"] < 5e-3 and 7.2e-3 < added_s["all-reduce"] < 10e-3:
            return
    raise AssertionError(f"α is {alphas} s by delay in ms; 2 ms of delay made it larger by {added_s} s")


def _alphas(delay_ms: float, at: Path) -> dict[str, float]:
    from paceline.bench.collectives.alpha_beta import fit_rows

    with network.nodes(2, delay_ms=delay_ms) as nodes:
        words = ("--operations", "send-recv,all-reduce", "--sizes", "64,256,1KiB", "--seconds", "0.5")
        rows = measured(nodes, 1, *words, at=at)
    return {str(row["operation"]): row["alpha_s"] for row in fit_rows(rows)}
