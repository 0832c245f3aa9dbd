"""Samples/s of many small files: a folder, the same files packed, and other libraries, with two workers.

The contenders read alternately: whole epochs in batches of 256, first undecoded, then JPEG images decoded by
Pillow. The numbers of files are multiples of a batch for each worker, so that no worker waits at the end of
an epoch. Cold reads begin with an empty page cache, which requires root. Libraries that are not installed
are left out: pip install webdataset litdata datasets.

    python benchmarks/data.py [--files 61440] [--images 3072] [--rounds 3] [--folder DIR] [--skip-cold]
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from machine import description
from paceline.data import Folder
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.order import SampleOrder
from paceline.data.samples import Samples
from paceline.data.shards.pack import pack

WORKERS, BATCH, CLASSES = 2, 256, 100
Epoch = Callable[[], Iterable[Any]]


def write_files(folder: Path, count: int) -> None:
    """Write files of 1 to 8 kB in class folders."""
    generator = np.random.default_rng(0)
    for number in range(CLASSES):
        (folder / f"{number:03}").mkdir(parents=True)
    for number, size in enumerate(generator.integers(1000, 8000, count).tolist()):
        (folder / f"{number % CLASSES:03}/{number:06}.bin").write_bytes(generator.bytes(size))


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images of 256 x 256 smooth pixels."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(CLASSES):
        (folder / f"{number:03}").mkdir(parents=True)
    for number in range(count):
        small = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        small.resize((256, 256)).save(folder / f"{number % CLASSES:03}/{number:06}.jpg", quality=90)


class Files(Dataset[Any]):
    """The plain dataset that people write."""

    def __init__(self, folder: Path, decode: Callable[[bytes], Any] | None):
        self.paths = sorted(folder.rglob("*.*"))
        self.decode = decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        content = self.paths[index].read_bytes()
        label = int(self.paths[index].parent.name)
        return (content if self.decode is None else self.decode(content)), label


def decode(content: bytes) -> torch.Tensor:
    """Decode by Pillow, for all contenders."""
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB")))


def collate(samples: list[Any]) -> Any:
    contents, labels = zip(*samples, strict=True)
    stacked = torch.stack(contents) if isinstance(contents[0], torch.Tensor) else list(contents)
    return stacked, torch.tensor(labels)


def paceline_epoch(folder: Path, is_decoded: bool, shuffle: Any) -> Epoch:
    dataset = Folder(folder, decode if is_decoded else None, suffixes=(".bin", ".jpg"))

    def epoch() -> Iterator[Any]:
        samples = Samples(dataset, "train", 0, None)
        parts = training_parts(
            RankBatchSlice(BATCH, 1, 0, 1), SampleOrder(len(dataset), 0, shuffle), 0, len(dataset) // BATCH
        )
        yield from batches(samples, parts, torch.device("cpu"), WORKERS, 2)

    return epoch


def plain_epoch(folder: Path, is_decoded: bool) -> Epoch:
    dataset = Files(folder, decode if is_decoded else None)
    return lambda: DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True, collate_fn=collate
    )


def webdataset_epoch(packed: Path, is_decoded: bool) -> Epoch:
    import webdataset as wds

    def read(sample: dict[str, Any]) -> Any:
        content = sample["jpg" if is_decoded else "bin"]
        return (decode(content) if is_decoded else content), int(sample["__key__"].split("/")[0])

    urls = [str(path) for path in sorted(packed.glob("*.tar"))]

    def epoch() -> Iterator[Any]:
        pipeline = wds.WebDataset(urls, shardshuffle=len(urls), empty_check=False).shuffle(1000).map(read)
        loader = wds.WebLoader(
            pipeline.batched(BATCH, collation_fn=collate),
            batch_size=None,
            num_workers=min(WORKERS, len(urls)),
        )
        yield from loader

    return epoch


class AsBytes:
    """What LitData stores of a file."""

    def __init__(self, is_decoded: bool):
        self.is_decoded = is_decoded

    def __call__(self, path: str) -> dict[str, Any]:
        return {"content": Path(path).read_bytes(), "label": int(Path(path).parent.name)}


def litdata_epoch(folder: Path, work: Path, is_decoded: bool) -> Epoch:
    import litdata

    out = work / f"litdata-{folder.name}"
    paths = [str(path) for path in sorted(folder.rglob("*.*"))]
    litdata.optimize(AsBytes(is_decoded), paths, str(out), chunk_bytes="64MB", num_workers=WORKERS)

    def read(samples: list[dict[str, Any]]) -> Any:
        return collate(
            [
                (decode(sample["content"]) if is_decoded else sample["content"], sample["label"])
                for sample in samples
            ]
        )

    def epoch() -> Iterator[Any]:
        dataset = litdata.StreamingDataset(str(out), shuffle=True)
        yield from litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=read
        )

    return epoch


def datasets_epoch(folder: Path, work: Path, is_decoded: bool) -> Epoch:
    import datasets

    out = work / f"datasets-{folder.name}"
    files = Files(folder, None)
    stored = [files[index] for index in range(len(files))]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(
        {"content": [content for content, _ in stored], "label": [label for _, label in stored]}
    ).save_to_disk(str(out))
    table = datasets.load_from_disk(str(out))

    def read(samples: list[dict[str, Any]]) -> Any:
        return collate(
            [
                (decode(sample["content"]) if is_decoded else sample["content"], sample["label"])
                for sample in samples
            ]
        )

    return lambda: DataLoader(
        table, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=read, drop_last=True
    )


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(epoch: Epoch) -> float:
    """Return samples/s of an epoch, from the start of the workers on."""
    begin, count = time.perf_counter(), 0
    for _, labels in epoch():
        count += len(labels)
    return count / (time.perf_counter() - begin)


def compare(contenders: dict[str, Epoch], rounds: int, before: Callable[[], None] = lambda: None) -> None:
    """Print the median of samples/s, and of its ratio to the first contender in the same round."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        names = [*contenders]
        for name in names if turn % 2 == 0 else names[::-1]:
            before()
            rates[name].append(measure(contenders[name]))
    first = next(iter(rates.values()))
    for name, found in rates.items():
        ratios = sorted(rate / other for rate, other in zip(found, first, strict=True))
        print(
            f"  {name:34} {statistics.median(found):10,.0f} samples/s   {statistics.median(ratios):5.2f}"
            f" ({ratios[0]:.2f}–{ratios[-1]:.2f})",
            flush=True,
        )


def rivals(folder: Path, packed: Path, work: Path, is_decoded: bool) -> dict[str, Epoch]:
    builders: dict[str, Callable[[], Epoch]] = {
        "WebDataset, the same shards": lambda: webdataset_epoch(packed, is_decoded),
        "LitData": lambda: litdata_epoch(folder, work, is_decoded),
        "Hugging Face datasets": lambda: datasets_epoch(folder, work, is_decoded),
    }
    found = {}
    for name, build in builders.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found[name] = build()
        except ImportError as error:
            print(f"  {name} is left out: {error}")
    torch.multiprocessing.set_start_method("fork", force=True)  # LitData changes it for the process
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=61_440)
    parser.add_argument("--images", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure [default: a temporary folder]")
    parser.add_argument("--skip-cold", action="store_true")
    options = parser.parse_args()
    print(description())
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        for name, write, count in (
            ("bin", write_files, options.files),
            ("jpg", write_images, options.images),
        ):
            write(work / name, count)
            shard_bytes = max(2**16, sum(path.stat().st_size for path in (work / name).rglob("*.*")) // 8)
            begin = time.perf_counter()
            result = pack([work / name], work / f"{name}-packed", shard_bytes, WORKERS)
            print(
                f"packed {result.files:,} {name} files into {result.shards} shards in"
                f" {time.perf_counter() - begin:.1f} s: {result.inodes_before:,} inodes became"
                f" {result.inodes_after:,}"
            )
        files, packed = work / "bin", work / "bin-packed"
        own = {
            "Paceline, packed": paceline_epoch(packed, False, "full"),
            "Paceline, packed, shuffle=window": paceline_epoch(packed, False, "window"),
            "Paceline, folder": paceline_epoch(files, False, "full"),
            "plain DataLoader, folder": plain_epoch(files, False),
        }
        others = rivals(files, packed, work, False)
        if not options.skip_cold:
            print("undecoded, cold:")
            compare(own | others, max(1, options.rounds // 2), drop_caches)
        print("undecoded, warm:")
        compare(own | others, options.rounds)
        files, packed = work / "jpg", work / "jpg-packed"
        print("JPEG decoded by Pillow, warm:")
        compare(
            {
                "Paceline, packed": paceline_epoch(packed, True, "full"),
                "plain DataLoader, folder": plain_epoch(files, True),
            }
            | rivals(files, packed, work, True),
            options.rounds,
        )


if __name__ == "__main__":
    main()
