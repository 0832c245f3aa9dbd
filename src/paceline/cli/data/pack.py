"""paceline pack: pack many small files into few tar shards, or a corpus into tokens."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_SHARD_SIZE = "256MiB"


def pack(
    paths: Annotated[
        list[Path], typer.Argument(metavar="SOURCE... OUT", help="Files and folders, and the folder to write")
    ],
    shard_size: Annotated[
        str | None, typer.Option(metavar="BYTES", help=f"Size of a shard [default: {DEFAULT_SHARD_SIZE}]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of processes [default: one per usable core]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="tokenizer.json; pack text as tokens [default: pack the files]"),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field of each line of .jsonl files that has the text [default: text]")
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Token after each document, '' for none [default: <|endoftext|>, </s> or such]",
        ),
    ] = None,
) -> None:
    """Pack many small files into few tar shards with an index, or texts into tokens.

    Files are stored byte for byte; tar and WebDataset read the shards. Each shard is read again after it was
    written. With --tokenizer, the sources are .txt files and .jsonl files with a document on each line. If
    the command is stopped, the same command continues.
    """
    from paceline.errors import SpecError

    if len(paths) < 2:
        raise SpecError(f"pack requires sources and the folder to write, got only {paths[0]}; add the folder")
    *sources, out = paths
    if tokenizer is not None:
        for name, value in (("--shard-size", shard_size), ("--workers", workers)):
            if value is not None:
                raise SpecError(f"{name} has no meaning with --tokenizer; leave it out")
        _pack_tokens(sources, out, tokenizer, field, end_token)
        return
    for name, text in (("--field", field), ("--end-token", end_token)):
        if text is not None:
            raise SpecError(f"{name} requires --tokenizer; specify a tokenizer.json, or leave it out")
    _pack_files(sources, out, shard_size or DEFAULT_SHARD_SIZE, workers)


def _pack_files(sources: list[Path], out: Path, shard_size: str, workers: int | None) -> None:
    from paceline.cli.options.progress import count_progress
    from paceline.cluster.limits import usable_cores
    from paceline.data.shards.pack import pack as pack_files
    from paceline.units import format_bytes, format_seconds, several

    size = _parse_size(shard_size)
    with count_progress("packing files") as on_progress:
        result = pack_files(sources, out, size, workers or usable_cores(), on_progress)
    rate = f", {format_bytes(result.bytes / result.seconds)}/s" if result.written else ""
    print(
        f"{out}: {several(result.files, 'file')} ({format_bytes(result.bytes)}) in"
        f" {several(result.shards, 'shard')}, {format_seconds(result.seconds)}{rate}"
    )
    print(f"{result.inodes_before:,} inodes became {result.inodes_after:,}")
    if result.written < result.shards:
        print(f"{several(result.shards - result.written, 'shard')} were complete already")
    if result.links:
        files = "the file that it points to" if result.links == 1 else "the files that they point to"
        print(f"{several(result.links, 'link')} became {files}")


def _pack_tokens(
    sources: list[Path], out: Path, tokenizer: Path, field: str | None, end_token: str | None
) -> None:
    from paceline.cli.options.progress import count_progress
    from paceline.data.pack_tokens import pack_tokens
    from paceline.units import format_bytes, format_seconds, several

    with count_progress("bytes of text") as on_progress:
        result = pack_tokens(sources, out, tokenizer, field or "text", end_token, on_progress)
    documents = several(result.documents, "document")
    print(
        f"{out}: {several(result.tokens, 'token')} ({result.dtype}) of {documents}"
        f" ({format_bytes(result.text_bytes)}), {format_seconds(result.seconds)}"
    )
    end = f"each document ends with {result.end_token}" if result.end_token else "documents have no end token"
    print(f"{end}; --end-token changes it")
    if result.reused:
        print(f"{several(result.reused, 'part')} were complete already")


def _parse_size(text: str) -> int:
    from paceline.errors import SpecError
    from paceline.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise SpecError(f"--shard-size: {error}") from error
    if size < 1:
        raise SpecError(f"--shard-size must be at least 1 B, got {text!r}")
    return size
