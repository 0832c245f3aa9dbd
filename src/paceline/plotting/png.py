"""PNG files: of arrays, without another library, and of figures of matplotlib."""

import io
import struct
import sys
import zlib
from typing import Any

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2, 4: 6}  # by number of channels: grey, RGB, RGBA


def encode_png(image: Any) -> bytes:
    """Return an array of uint8 of shape (height, width, channels) as a PNG file.

    channels: 1, 3 or 4. See the PNG specification, third edition, sections 5 and 11."""
    height, width, channels = image.shape
    rows = b"".join(b"\0" + image[row].tobytes() for row in range(height))  # filter 0 of each row: none
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def read_size(png: bytes) -> tuple[int, int, int]:
    """Return height, width and number of channels of a PNG file."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    return height, width, {value: key for key, value in COLOUR_TYPES.items()}[kind]


def is_figure(value: Any) -> bool:
    """Return whether a value is a figure of matplotlib, which need not be installed."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, module.Figure)


def encode_figure(figure: Any) -> bytes:
    """Return a figure of matplotlib as a PNG file, and close it if pyplot holds it."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)
    return file.getvalue()
