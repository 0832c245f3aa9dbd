"""Time and memory of one process that computes the communication volume of a Llama of 70 billion parameters.

    python benchmarks/comms.py [--plan tp=8,pp=8,dp=16]

The default is a step on 1,024 ranks. With a pipeline, the volumes of all stages are computed one after
another. Requires transformers, for the model.
"""

import argparse
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.units import format_bytes


class Tokens:
    def __init__(self, vocabulary: int, length: int):
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(self.vocabulary, (self.length + 1,))


class Llama(Task):
    """Llama 2 70B's sizes (Touvron et al., 2023) with the vocabulary of Llama 3."""

    width: int = 8192
    depth: int = 80
    heads: int = 64
    key_heads: int = 8
    inner: int = 28672
    vocabulary: int = 128256
    length: int = 128

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.inner,
            vocab_size=self.vocabulary,
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def dataset(self, split: str) -> Tokens | None:
        return Tokens(self.vocabulary, self.length) if split == "train" else None

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def loss(self, output: object, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.transpose(1, 2), batch[:, 1:], reduction="none")  # type: ignore[attr-defined]


def main() -> None:
    import machine
    from paceline import Spec
    from paceline.plan.plan import parse
    from paceline.training.dry_run.dry_run import compute_stage_volumes

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="zero3")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, start_cpu_s = time.perf_counter(), time.process_time()
    volumes = compute_stage_volumes(Spec(batch=options.batch), parse(options.plan), options.ranks, Llama())
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(
        f"{machine.description()}, torch {version('torch')}, "
        f"transformers {version('transformers')}; one thread"
    )
    print(
        f"plan {options.plan} on {options.ranks:,} ranks: {wall_s:.1f} s ({cpu_s:.1f} s of CPU), "
        f"peak memory {format_bytes(peak_bytes)}"
    )
    for stage, volume in enumerate(volumes):
        prefix = f"pp {stage} of {len(volumes)}: " if len(volumes) > 1 else ""
        print(
            f"{prefix}{volume.calls:,} calls, {format_bytes(volume.bytes)}; "
            f"a rank sends {format_bytes(volume.sent_bytes)}"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
