"""Reading PNG images and WAV sounds with the standard library alone.

Images are gray, colour or have a palette, with 8 or 16 bits, and are not interlaced.
"""

from __future__ import annotations

import os
import struct
import wave
import zlib
from pathlib import Path

import numpy as np

from rlx.errors import FormatError
from rlx.files import file_boundary, open_plain, read_plain

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # colour type -> samples per pixel
_MOST_PIXELS = 1 << 28
_MOST_RATIO = 1032  # to which zlib can pack bytes


def read_png(path: Path) -> np.ndarray:
    """Pixels as u8[height, width, channels] with 1 (gray) or 3 (RGB) channels; transparency is dropped."""
    with file_boundary(path, "PNG image"):
        return _decode(read_plain(path))


def _decode(data: bytes) -> np.ndarray:
    if not data.startswith(_SIGNATURE):
        raise ValueError("it does not begin like a PNG file")
    at, packed, palette, head = len(_SIGNATURE), b"", b"", b""
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        at += 12 + length
        if kind == b"IHDR":
            head = body
        elif kind == b"PLTE":
            palette = body
        elif kind == b"IDAT":
            packed += body
        elif kind == b"IEND":
            break
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", head)
    if interlaced or bits not in (8, 16) or colour not in _CHANNELS:
        raise ValueError(f"{bits} bits, colour type {colour}, interlaced {interlaced} is not supported")
    if not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels")
    pixel = _CHANNELS[colour] * bits // 8
    size = height * (1 + width * pixel)
    if size > _MOST_RATIO * (len(packed) + 1):  # before memory is allocated for it
        raise ValueError(f"{width} x {height} pixels cannot be in {len(packed)} bytes")
    raw = zlib.decompressobj().decompress(packed, size)
    rows = np.frombuffer(raw, np.uint8).reshape(height, 1 + width * pixel)
    pixels = _unfiltered(rows, pixel).reshape(height, width, pixel)[:, :, :: bits // 8]
    if colour == 3:
        pixels = np.frombuffer(palette, np.uint8).reshape(-1, 3)[pixels[:, :, 0]]
    return pixels[:, :, :1] if colour in (0, 4) else pixels[:, :, :3]


def _unfiltered(rows: np.ndarray, pixel: int) -> np.ndarray:
    """Bytes of the image: every row is stored as a difference to its left, its upper or both neighbours."""
    out = np.zeros((len(rows) + 1, pixel + rows.shape[1] - 1), np.uint8)  # zeros above and to the left
    for y, row in enumerate(rows):
        above, line, kind = out[y], out[y + 1], row[0]
        line[pixel:] = row[1:]
        if kind == 1:
            body = line[pixel:].reshape(-1, pixel)
            np.cumsum(body, axis=0, dtype=np.uint8, out=body)
        elif kind == 2:
            line[pixel:] += above[pixel:]
        elif kind in (3, 4):
            _from_both(line, above, pixel, kind)
        elif kind:
            raise ValueError(f"filter {kind} is unknown")
    return out[1:, pixel:]


def _from_both(line: np.ndarray, above: np.ndarray, pixel: int, kind: int) -> None:
    """Average (3) and Paeth (4) filters: each byte needs the one before."""
    now, up = line.tolist(), above.tolist()
    for x in range(pixel, len(now)):
        a, b, c = now[x - pixel], up[x], up[x - pixel]
        if kind == 3:
            guess = (a + b) // 2
        else:
            to_a, to_b, to_c = abs(b - c), abs(a - c), abs(a + b - 2 * c)
            guess = a if to_a <= to_b and to_a <= to_c else b if to_b <= to_c else c
        now[x] = (now[x] + guess) & 255
    line[:] = now


def read_wav(path: Path) -> np.ndarray:
    """Samples as f32 in -1..1, channels averaged."""
    with file_boundary(path, "WAV sound"), open_plain(path) as plain, wave.open(plain, "rb") as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        raw = file.readframes(min(file.getnframes(), os.fstat(plain.fileno()).st_size))
        kinds = {1: ("u1", 128, 128), 2: ("<i2", 0, 32768), 4: ("<i4", 0, 2**31)}  # dtype, silence, scale
        if width not in kinds:
            raise FormatError(f"{path} has {8 * width} bits per sample; RLX reads 8, 16 and 32")
        kind, zero, scale = kinds[width]
        whole = len(raw) // (width * channels) * (width * channels)
        samples = (np.frombuffer(raw[:whole], kind).astype(np.float64) - zero) / scale
        return samples.reshape(-1, channels).mean(axis=1).astype(np.float32)
