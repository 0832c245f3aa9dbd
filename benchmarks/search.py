"""Plans per second of the planner, and the time of strong and weak scaling over 13 numbers of ranks."""

import platform
import sys
import time

from paceline.cluster.facts import Cluster
from paceline.cluster.published import parse
from paceline.plan.model.facts import ModelFacts
from paceline.plan.model.library import load_model
from paceline.plan.model.transformer import Transformer
from paceline.plan.search.scaling import predict_scaling
from paceline.plan.search.search import search_plans

COUNTS = tuple(2**power for power in range(13))
TRILLION = Transformer(
    name="10¹² parameters", layers=128, hidden=25600, heads=160, vocab=51200, seq=2048, positions=2048
)


def main() -> None:
    assert "torch" not in sys.modules
    print(f"One core, {platform.machine()}, Python {platform.python_version()}; torch is not imported")
    print("| model | devices | batch | plans | that fit | seconds | plans/s |")
    print("|" + " -- |" * 7)
    for facts, devices, batch in (
        (load_model("llama3-8b"), 64, 1024),
        (load_model("llama3-70b"), 512, 2048),
        (TRILLION.facts(), 3072, 3072),
        (load_model("deepseek-v3"), 2048, 4096),
        (load_model("kimi-k2"), 3072, 3072),
    ):
        measure(facts, parse(f"a100-80g:8x{devices // 8}@25"), batch)
    print("\n| model | numbers of ranks | that fit | seconds of scale |")
    print("|" + " -- |" * 4)
    for name in ("resnet50", "llama3-8b", "llama3-70b"):
        start = time.process_time()
        result = predict_scaling(load_model(name), parse("h100:8x512@50"), COUNTS, 1024)
        print(f"| {name} | {len(COUNTS)} | {len(result.strong.points)} | {time.process_time() - start:.2f} |")


def measure(facts: ModelFacts, cluster: Cluster, batch: int) -> None:
    """Print the fastest of three searches; the first fills the caches."""
    result, seconds = None, float("inf")
    for _ in range(3):
        start = time.process_time()
        result = search_plans(facts, cluster, batch)
        seconds = min(seconds, time.process_time() - start)
    assert result is not None
    plans = len(result.fitting) + len(result.rejected)
    print(
        f"| {facts.name} | {cluster.devices} | {batch} | {plans} | {len(result.fitting)} | "
        f"{seconds:.2f} | {plans / seconds:,.0f} |"
    )


if __name__ == "__main__":
    main()
