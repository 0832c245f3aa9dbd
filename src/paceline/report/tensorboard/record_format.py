"""Records of files for TensorBoard: a length and data, each with a checksum (CRC-32C, masked).

TensorBoard's own writer computes the checksum byte by byte in Python, which took most of the time of writing
histograms. The format is that of TFRecord files; the checksum is that of RFC 3720, appendix B.4.
"""

import functools
import struct
from typing import Any

POLYNOMIAL = 0x82F63B78
LANE = 256  # bytes; lanes are processed side by side
MASK_DELTA = 0xA282EAD8


def encode_record(data: bytes) -> bytes:
    """Return a record."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked(length), data, _masked(data)))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF)


@functools.cache
def _byte_table() -> list[int]:
    """Return the register after one byte, by the byte."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


@functools.cache
def _lane_tables() -> tuple[Any, list[list[int]]]:
    """Return the table as an array, and the register after a lane of zeros, by each of its four bytes."""
    import numpy as np

    table = np.array(_byte_table(), np.uint32)
    registers = np.arange(256, dtype=np.uint32)[None] << np.array([[0], [8], [16], [24]], np.uint32)
    for _ in range(LANE):
        registers = table[registers & 0xFF] ^ registers >> 8
    return table, registers.tolist()


def crc32c(data: bytes) -> int:
    """Return the checksum of the data.

    The register is linear in its bits and in the data. So lanes are processed at the same time, each from
    zero, and the register of a lane is then moved over the lanes after it.
    """
    if len(data) < 2 * LANE:
        register = 0xFFFFFFFF
        table = _byte_table()
        for byte in data:
            register = table[(register ^ byte) & 0xFF] ^ register >> 8
        return register ^ 0xFFFFFFFF
    import numpy as np

    bytes_ = np.frombuffer(data, np.uint8).copy()
    bytes_[:4] ^= 0xFF  # instead of a register of ones at the begin
    padding = np.zeros(-len(data) % LANE, np.uint8)  # zeros do not change a register of zeros
    lanes = np.concatenate([padding, bytes_]).reshape(-1, LANE).T.astype(np.uint32)
    table, (first, second, third, fourth) = _lane_tables()
    registers = np.zeros(lanes.shape[1], np.uint32)
    for column in lanes:
        registers = table[(registers ^ column) & 0xFF] ^ registers >> 8
    whole = 0
    for own in registers.tolist():
        whole = (
            first[whole & 0xFF]
            ^ second[whole >> 8 & 0xFF]
            ^ third[whole >> 16 & 0xFF]
            ^ fourth[whole >> 24]
            ^ own
        )
    return whole ^ 0xFFFFFFFF
