"""Loading a sharded folder of Hugging Face under zero3, compared with reading its bytes.

    python benchmarks/load_folder.py [--gigabytes 2] [--rounds 5] [--ranks 2] [--cold]

In each round, all ranks read their shares of the bytes of all files into memory, and load the model from the
same files; both are timed. The files are in the page cache, or on the disk with --cold. The peak of memory is
that of a load: of memory that the rank allocated, and of resident memory, which contains pages of mapped
files.
"""

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline import Spec
from paceline.distributed.world import read_world
from paceline.hf.task import HuggingFace
from paceline.plan.plan import parse
from paceline.training.init.deferred_init import fill_
from paceline.training.init.pretrained import PretrainedWeights
from paceline.training.model_facts.model_analysis import analyze_model
from paceline.training.setup import build_training
from paceline.units import format_bytes

CPU = torch.device("cpu")
WIDTH, VOCABULARY, FILES = 1024, 8192, 8
ALLOCATED, RESIDENT = "RssAnon", "VmRSS"
SAMPLE_S = 0.002


def write_folder(folder: Path, gigabytes: float) -> None:
    """Write a Llama of this size with random weights, in several files, and a tokenizer and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    of_layer = 4 * WIDTH**2 + 3 * WIDTH * 4 * WIDTH
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * VOCABULARY * WIDTH) / of_layer))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=size // FILES + 4 * VOCABULARY * WIDTH)
    words = {"<eos>": 0, "a": 1, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    (folder / "text.txt").write_text("a " * 100)


def read_share(files: list[Path]) -> None:
    """Read the share of this rank of each file into memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bounds = [
        [size * part // ranks for part in (rank, rank + 1)]
        for size in (file.stat().st_size for file in files)
    ]
    memory = memoryview(torch.empty(sum(end - begin for begin, end in bounds), dtype=torch.uint8).numpy())
    at = 0
    for file, (begin, end) in zip(files, bounds, strict=True):
        with open(file, "rb", buffering=0) as opened:
            opened.seek(begin)
            while begin < end:
                count = opened.readinto(memory[at : at + end - begin])
                begin, at = begin + count, at + count


def read_memory(name: str) -> int:
    """Return the bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {name}")


@contextlib.contextmanager
def watch_peaks() -> Iterator[dict[str, int]]:
    """Yield the bytes by which memory exceeds that at the begin of the context, at the peak."""
    peaks = dict.fromkeys((ALLOCATED, RESIDENT), 0)
    before = {name: read_memory(name) for name in peaks}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            for name in peaks:
                peaks[name] = max(peaks[name], read_memory(name) - before[name])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def time_together(run: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have run a function."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def load(folder: Path) -> tuple[float, dict[str, int], int, int]:
    """Load the model. Returns seconds, peaks of memory, bytes of the shard and of the largest tensor."""
    task = HuggingFace(folder=str(folder), data=str(folder / "text.txt"), length=8)
    world = read_world()
    spec, plan = Spec(batch=world.size), parse("zero3").resolve(world.size)
    analysis = analyze_model(spec, plan, task, CPU)
    peaks = dict[str, int]()
    pretrained: PretrainedWeights

    def open_files() -> None:
        nonlocal pretrained
        pretrained = PretrainedWeights(task.pretrained(), analysis.model)

    def fill(model: Any) -> None:
        nonlocal seconds
        with watch_peaks() as found:
            seconds += time_together(lambda: fill_(model, analysis.weights, CPU, pretrained))
        peaks.update(found)

    largest = max(parameter.numel() * parameter.element_size() for parameter in analysis.model.parameters())
    seconds = time_together(open_files)
    prepared = build_training(spec, plan, world, task, CPU, fill, analysis=analysis)
    parameters: Any = prepared.model.parameters()
    shard = sum(parameter.to_local().nbytes for parameter in parameters)
    prepared.release()
    return seconds, peaks, shard, largest


def forget_pages(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    files = sorted(options.folder.glob("*.safetensors"))
    ratios, read_times, load_times = [], [], []
    for index in range(-1, options.rounds):  # the first round is the warm-up
        for time_of in ("read", "load") if index % 2 else ("load", "read"):
            if options.cold and dist.get_rank() == 0:
                forget_pages(files)
            if time_of == "read":
                read_s = time_together(partial(read_share, files))
            else:
                load_s, peaks, shard, largest = load(options.folder)
            ctypes.CDLL(None).malloc_trim(0)  # so that the next load does not reuse memory of this one
        if index >= 0:
            ratios.append(load_s / read_s)
            read_times.append(read_s)
            load_times.append(load_s)
    if dist.get_rank() == 0:
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"reading the bytes {statistics.median(read_times):6.2f} s\n"
            f"loading the model {statistics.median(load_times):6.2f} s, {median:.2f} ({low:.2f}–{high:.2f}) "
            "times as long\n"
            f"shard of a rank {format_bytes(shard)}, largest tensor {format_bytes(largest)}\n"
            f"peak of a rank  {format_bytes(peaks[ALLOCATED])} allocated, {format_bytes(peaks[RESIDENT])} "
            "resident with pages of mapped files"
        )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5, help="at least 2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return
    import machine

    with tempfile.TemporaryDirectory(dir=os.curdir) as name:
        folder = Path(name).resolve()
        write_folder(folder, options.gigabytes)
        files = sorted(folder.glob("*.safetensors"))
        size = format_bytes(sum(file.stat().st_size for file in files))
        print(
            f"{machine.description()}, torch {torch.__version__}; zero3 on {options.ranks} ranks; "
            f"{size} in {len(files)} files, {'on the disk' if options.cold else 'in the page cache'}; "
            f"median (quartiles) of {options.rounds} rounds",
            flush=True,
        )
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        command = [sys.executable, *torchrun, *sys.argv, "--folder", str(folder)]
        if status := subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            sys.exit(status)


if __name__ == "__main__":
    main()
