"""Pack a corpus of text into a memory-mapped file of tokens."""

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.shards.pack import TEMPORARY, owned_folder
from paceline.data.token_files import DOCUMENTS, FORMAT, META, TOKENIZER, TOKENS, count_tokens
from paceline.errors import DataError
from paceline.files import reason, replaced, write_whole

PIECE_BYTES = 2**26  # of text, after which a stopped command continues
DOCUMENTS_PER_CALL = 1000
SUFFIXES = {".jsonl": True, ".ndjson": True, ".txt": False}  # whether each line is a JSON object
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
OWN = (".piece-", TOKENS, DOCUMENTS, TOKENIZER)


@dataclass(frozen=True)
class Piece:
    """A part of a file, whose documents begin from `begin` to before `end`."""

    path: Path
    begin: int
    end: int
    is_jsonl: bool


@dataclass(frozen=True)
class TokensResult:
    """What `pack_tokens` did. reused: the number of pieces of an earlier call, which was stopped."""

    tokens: int
    documents: int
    text_bytes: int
    dtype: str
    end_token: str | None
    reused: int
    seconds: float


def pack_tokens(
    sources: Sequence[Path],
    out: Path,
    tokenizer_file: Path,
    key: str = "text",
    end_token: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> TokensResult:
    """Tokenize the documents of text files, and write them into the folder `out`.

    A line of a .jsonl file is a document, in its field `key`; a .txt file is one. The order is that of the
    arguments, of the names in a folder, and of the lines. Each document ends with `end_token`; None: with the
    first of END_TOKENS that the tokenizer has. If the process is stopped, the same call continues.
    on_progress gets the bytes of text that are done and all.

    The tokenizer runs on all cores. Raises DataError.
    """
    start = time.perf_counter()
    tokenizer, content = _load_tokenizer(tokenizer_file)
    vocabulary = count_tokens(tokenizer)
    end_token, end_id = _find_end_token(tokenizer, end_token, tokenizer_file)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    pieces = _find_pieces(sources)
    total = sum(piece.end - piece.begin for piece in pieces)
    digest = _digest(pieces, content, key, end_id)
    with owned_folder(out):
        _check_folder(out, digest)
        done = reused = 0
        for number, piece in enumerate(pieces):
            stem = out / f".piece-{number:06}.{digest}"
            if stem.with_name(f"{stem.name}.json").exists():
                reused += 1
            else:
                documents = (
                    [*ids, end_id] if end_id is not None else ids
                    for ids in _encode(tokenizer, _read_documents(piece, key))
                )
                _write_piece(stem, documents, np.dtype(dtype).newbyteorder("<"))
            done += piece.end - piece.begin
            on_progress(done, total)
        tokens, documents_count = _join(out, digest, len(pieces), dtype, vocabulary, end_token, content)
    return TokensResult(tokens, documents_count, total, dtype, end_token, reused, time.perf_counter() - start)


def _load_tokenizer(path: Path) -> tuple[Any, bytes]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DataError('--tokenizer requires tokenizers: pip install "paceline[tokens]"') from error
    try:
        content = path.read_bytes()
        return Tokenizer.from_buffer(content), content
    except OSError as error:
        raise DataError(f"cannot read the tokenizer {path}: {reason(error)}") from error
    except Exception as error:  # the library raises Exception
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face: {error}") from error


def _find_end_token(tokenizer: Any, requested: str | None, path: Path) -> tuple[str | None, int | None]:
    if requested is None:
        requested = next((name for name in END_TOKENS if tokenizer.token_to_id(name) is not None), None)
        return requested, tokenizer.token_to_id(requested) if requested is not None else None
    if requested == "":
        return None, None
    number = tokenizer.token_to_id(requested)
    if number is None:
        raise DataError(f"{path} has no token {requested!r}; use --end-token '' for none")
    return requested, number


def _find_pieces(sources: Sequence[Path]) -> list[Piece]:
    pieces = []
    for source in sources:
        paths = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in paths:
            if path.suffix.lower() not in SUFFIXES:
                if source.is_dir():
                    continue
                raise DataError(f"{path} is not {', '.join(SUFFIXES)}; convert it, or leave it out")
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(f"cannot read {path}: {reason(error)}") from error
            is_jsonl = SUFFIXES[path.suffix.lower()]
            step = PIECE_BYTES if is_jsonl else max(1, size)
            pieces += [Piece(path, at, min(at + step, size), is_jsonl) for at in range(0, size, step)]
    if not pieces:
        raise DataError(f"{', '.join(map(str, sources))}: no text; specify files {', '.join(SUFFIXES)}")
    return pieces


def _digest(pieces: Sequence[Piece], tokenizer: bytes, key: str, end_id: int | None) -> str:
    described = [(str(p.path), p.begin, p.end, p.path.stat().st_mtime_ns) for p in pieces]
    text = repr((described, hashlib.sha256(tokenizer).hexdigest(), key, end_id))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _check_folder(out: Path, digest: str) -> None:
    """Raise DataError if the folder has files of others; delete pieces of another request."""
    for name in sorted(os.listdir(out)):
        if name == META:
            raise DataError(f"{out} has packed tokens already; specify a new folder")
        is_temporary = re.fullmatch(TEMPORARY, name) is not None  # of a call that was killed
        if not (is_temporary or name.startswith(OWN)):
            raise DataError(f"{out} is not empty: it has {name}; specify a new folder")
        if is_temporary or (name.startswith(".piece-") and name.split(".")[2] != digest):
            (out / name).unlink()


def _read_documents(piece: Piece, key: str) -> Iterator[str]:
    try:
        with open(piece.path, "rb") as file:
            if not piece.is_jsonl:
                yield file.read().decode()
                return
            if piece.begin:  # the line before belongs to the piece before
                file.seek(piece.begin - 1)
                file.readline()
            while file.tell() < piece.end and (line := file.readline()):
                if line.strip():
                    yield _read_line(line, key, piece.path, file.tell() - len(line))
    except OSError as error:
        raise DataError(f"cannot read {piece.path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{piece.path} is not UTF-8: {error}; convert it") from error


def _read_line(line: bytes, key: str, path: Path, position: int) -> str:
    def fail(what: str) -> DataError:
        with open(path, "rb") as file:
            steps = range(0, position, 2**20)
            number = sum(file.read(min(2**20, position - at)).count(b"\n") for at in steps)
        return DataError(f"{path}, line {number + 1}: {what}")

    try:
        tree = json.loads(line)
    except ValueError as error:
        raise fail(f"not JSON: {error}") from error
    if not isinstance(tree, dict) or key not in tree:
        known = ", ".join(map(str, list(tree)[:5])) if isinstance(tree, dict) else type(tree).__name__
        raise fail(f"no field {key!r}, got {known}; specify --field")
    if not isinstance(tree[key], str):
        raise fail(f"the field {key!r} is not a text; specify --field")
    return str(tree[key])


def _encode(tokenizer: Any, documents: Iterator[str]) -> Iterator[list[int]]:
    while texts := list(islice(documents, DOCUMENTS_PER_CALL)):
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids


def _write_piece(stem: Path, documents: Iterable[list[int]], dtype: "np.dtype[Any]") -> None:
    """Write the tokens and lengths of a piece; its description is written last, when all is complete."""
    lengths, crc = [], 0
    path = stem.with_name(f"{stem.name}.tokens")
    with replaced(path, DataError) as temporary, open(temporary, "wb") as file:
        for ids in documents:
            data = np.array(ids, dtype=dtype).tobytes()
            file.write(data)
            crc = zlib.crc32(data, crc)
            lengths.append(len(ids))
    description = json.dumps({"crc": crc, "lengths": lengths})
    write_whole(stem.with_name(f"{stem.name}.json"), description, DataError)


def _join(
    out: Path, digest: str, pieces: int, dtype: str, vocabulary: int, end_token: str | None, tokenizer: bytes
) -> tuple[int, int]:
    """Write the files of the folder from the pieces, and delete these. Return tokens and documents."""
    stems = [out / f".piece-{number:06}.{digest}" for number in range(pieces)]
    lengths: list[int] = []
    with replaced(out / TOKENS, DataError) as temporary, open(temporary, "wb") as file:
        for stem in stems:
            description = json.loads(stem.with_name(f"{stem.name}.json").read_bytes())
            lengths += description["lengths"]
            with open(stem.with_name(f"{stem.name}.tokens"), "rb") as part:
                crc = 0
                while data := part.read(2**22):
                    crc = zlib.crc32(data, crc)
                    file.write(data)
            if crc != description["crc"]:
                raise DataError(f"{part.name} differs from what was written to it; check the disk")
    ends = np.cumsum(lengths, dtype="<u8")
    with replaced(out / DOCUMENTS, DataError) as temporary:
        temporary.write_bytes(ends.tobytes())
    with replaced(out / TOKENIZER, DataError) as temporary:
        temporary.write_bytes(tokenizer)
    meta = {
        "format": FORMAT,
        "dtype": dtype,
        "tokens": sum(lengths),
        "documents": len(lengths),
        "vocabulary": vocabulary,
        "end_token": end_token,
    }
    write_whole(out / META, json.dumps(meta, indent=2) + "\n", DataError)
    for stem in stems:
        for suffix in ("tokens", "json"):
            stem.with_name(f"{stem.name}.{suffix}").unlink()
    return sum(lengths), len(lengths)
