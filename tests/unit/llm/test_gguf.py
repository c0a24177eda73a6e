"""GGUF files: formats bit for bit as the `gguf` package reads them, and files that lie."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from rlx.errors import FormatError
from rlx.llm.blocks import FORMATS, decode
from rlx.llm.gguf import open_gguf
from rlx.runtime.native.bus_guard import is_available

QUANTISED = [number for number, format in FORMATS.items() if format.decode is not None]


@pytest.mark.parametrize("number", QUANTISED, ids=lambda n: FORMATS[n].name)
def test_every_format_has_the_bits_of_the_gguf_package(number: int) -> None:
    format, kind = FORMATS[number], gguf.GGMLQuantizationType(number)
    assert (format.name, format.size, format.bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    raw = np.random.default_rng(number).integers(0, 256, (200, format.bytes * 3), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, kind)
        groups = decode(format, raw)
        got = groups.numbers()
    same = (want.view(np.uint32) == got.view(np.uint32)) | (np.isnan(want) & np.isnan(got))
    assert same.all()
    codes = groups.codes.astype(int)
    span = codes.max() - codes.min()
    assert span < 1 << format.bits, "bits says how many a code needs"
    assert format.group == groups.group and format.minimums == (groups.minimums is not None)
    if format.halves:
        halves = groups.scales.astype(np.float16).astype(np.float32)
        assert np.array_equal(halves, groups.scales, equal_nan=True)


def test_the_largest_exponents_of_mxfp4() -> None:
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0], raw[:, 1:] = np.arange(256), 0x71
    with np.errstate(over="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(decode(FORMATS[39], raw).numbers(), want)


def small_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("llama.flag", True)
    writer.add_array("llama.words", ["a", "bc", "ä"])
    writer.add_array("llama.numbers", [1, 2, 3])
    writer.add_array("llama.flags", [True, False])
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((3, 64), np.float32)
    writer.add_tensor("plain", matrix)
    writer.add_tensor("half", matrix.astype(np.float16))
    for kind in ("Q4_1", "Q8_0", "BF16"):
        type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(matrix, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_metadata_and_tensors(file: Path) -> None:
    ours, theirs = open_gguf(file), gguf.GGUFReader(file)
    assert ours.metadata["general.architecture"] == "llama"
    assert ours.get("llama.block_count", int) == 2 and ours.get("llama.flag", bool) is True
    assert ours.get("llama.words", list) == ["a", "bc", "ä"]
    assert ours.get("llama.numbers", np.ndarray).tolist() == [1, 2, 3]
    assert ours.get("llama.flags", np.ndarray).tolist() == [True, False]
    assert ours.get("llama.block_count", float) == 2.0
    for tensor in theirs.tensors:
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = ours.tensors[tensor.name].array()
        assert got.shape == (3, 64)
        assert np.array_equal(got.astype(np.float32), want.reshape(got.shape))
    assert ours.tensors.asked == set(ours.tensors)


def test_wrong_questions_name_the_key_and_the_file(file: Path) -> None:
    ours = open_gguf(file)
    with pytest.raises(FormatError, match=r"small.gguf: the metadata has no 'llama.heads'"):
        ours.get("llama.heads", int)
    with pytest.raises(FormatError, match=r"'llama.words' is of type list, not int"):
        ours.get("llama.words", int)
    with pytest.raises(FormatError, match=r"'llama.flag' is of type bool, not int"):
        ours.get("llama.flag", int)
    with pytest.raises(FormatError, match=r"small.gguf has no tensor 'blk.0'"):
        ours.tensors["blk.0"]


def key(name: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name


def head(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def tensor(name: bytes, sizes: list[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return key(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62
BAD = {
    "empty": (b"", "does not begin with 'GGUF'"),
    "another file": (b"\x80\x02abcdefgh", "does not begin with 'GGUF'"),
    "nothing more": (b"GGUF", "the version takes 4 bytes, and 0 are left"),
    "version 1": (head(0, 0, 1), "it has version 1; versions 2 and 3"),
    "big-endian": (head(0, 0, 3 << 24), "big-endian"),
    "many tensors": (head(HUGE, 0), "it says that it has"),
    "long key": (head(0, 1) + struct.pack("<Q", HUGE), "the key of metadata entry 0 takes"),
    "long array": (head(0, 1) + key(b"k") + struct.pack("<IIQ", 9, 5, HUGE), "the array 'k' takes"),
    "many strings": (head(0, 1) + key(b"k") + struct.pack("<IIQ", 9, 8, HUGE), "the array 'k' takes"),
    "long string": (
        head(0, 1) + key(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE),
        "string 0 of the array 'k' goes beyond the end",
    ),
    "array of arrays": (head(0, 1) + key(b"k") + struct.pack("<IIQ", 9, 9, 1), "have the type 9"),
    "unknown type": (head(0, 1) + key(b"k") + struct.pack("<I", 77), "'k' has the unknown type 77"),
    "twice": (head(0, 2) + 2 * (key(b"k") + struct.pack("<II", 4, 1)), "the metadata has 'k' twice"),
    "alignment": (
        head(0, 1) + key(b"general.alignment") + struct.pack("<II", 4, 0),
        "the alignment 0 is not a power of two",
    ),
    "axes": (head(1, 0) + key(b"t") + struct.pack("<I", 5), "tensor 't' has 5 axes"),
    "unread format": (head(1, 0) + tensor(b"t", [256], 16, 0), "has the format IQ2_XXS; RLX reads F32"),
    "unknown format": (head(1, 0) + tensor(b"t", [256], 99, 0), "has the format 99; RLX reads F32"),
    "row of blocks": (head(1, 0) + tensor(b"t", [33], 2, 0), "rows of Q4_0 have a multiple of 32"),
    "no elements": (head(1, 0) + tensor(b"t", [0], 0, 0), "sizes are at least 1"),
    "overflow": (head(1, 0) + tensor(b"t", [HUGE, HUGE, 4], 0, 0), "not an aligned place inside the file"),
    "far away": (head(1, 0) + tensor(b"t", [1], 0, HUGE), "not an aligned place inside the file"),
    "unaligned": (head(1, 0) + tensor(b"t", [1], 0, 4) + bytes(64), "not an aligned place inside"),
    "same tensor": (head(2, 0) + 2 * tensor(b"t", [1], 0, 0) + bytes(64), "it has the tensor 't' twice"),
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_lie(what: str, tmp_path: Path) -> None:
    content, message = BAD[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"bad.gguf") as raised:
        open_gguf(path)
    assert message in str(raised.value)


def test_what_is_not_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(FormatError, match="cannot read"):
            open_gguf(path)


@pytest.mark.skipif(not is_available(), reason="the guard is for Linux")
def test_a_file_that_is_cut_short_while_it_is_open(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes() + bytes(1 << 16))
    opened = open_gguf(path)
    os.truncate(path, 0)
    with pytest.raises(FormatError, match=r"cut\.gguf was cut short while it was read"):
        opened.tensors["Q8_0"].array()
    assert opened.tensors["plain"].array().shape == (3, 64), "plain numbers are looked at later"
    with pytest.raises(FormatError, match="cut short"):
        opened.tensors.check()
