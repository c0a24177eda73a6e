"""Weights of GGUF files as programs hold them: the numbers and the size of the file."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import rlx
from rlx import ops
from rlx.ir.graph import Node
from rlx.llm.blocks import FORMATS
from rlx.llm.operands import coded_operands, coding_of, matrix_parts
from rlx.llm.tensors import Entry, InMemory

CODED = [number for number, format in FORMATS.items() if format.decode is not None]
SIZES = {  # of a program's weights, as a share of the file's
    "Q4_0": 1.0, "Q4_1": 1.0, "Q8_0": 1.0, "Q5_0": 1.19, "Q5_1": 1.17,
    "Q3_K": 1.33, "Q4_K": 1.03, "Q5_K": 1.21, "Q6_K": 1.0, "IQ4_XS": 2.0,
}  # fmt: skip


def entry_of(number: int, rows: int, columns: int) -> Entry:
    """A matrix of random blocks whose factors are finite."""
    format = FORMATS[number]
    raw = np.random.default_rng(number).integers(
        0, 256, (rows, columns // format.size, format.bytes), np.uint8
    )
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    both = (0, 2) if format.minimums else (0,)
    for at in () if format.e2m1 else halves.get(format.name, both):
        scale = np.random.default_rng(at).uniform(-0.01, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    if format.e2m1:
        raw[..., 0] = 120
    return Entry("w", (rows, columns), format, InMemory(raw.tobytes(), "w.gguf"), 0)


@pytest.mark.parametrize("number", CODED, ids=lambda n: FORMATS[n].name)
def test_a_program_holds_the_numbers_of_the_file(number: int) -> None:
    """A table that a matmul reads, too: its rows are those of the `gguf` package, bit for bit."""
    entry = entry_of(number, 64, 512)
    g = rlx.Graph("table")

    def matrix() -> Node:
        held = [g.param(part.name, part.shape, part.dtype, value=part.make()) for part in matrix_parts(entry)]
        made: Node = ops.dequantize_groups(*coded_operands(entry.format, held), **coding_of(entry.format))
        return made

    w = matrix()
    rows = ops.embedding(ops.transpose(w), g.input("at", ("n",), "i32"))
    g.output("rows", rows)
    g.output("y", ops.matmul(ops.tanh(rows), w))
    program = rlx.compile(g)
    assert not program.stats["host_thunks"]
    wanted = gguf.quants.dequantize(entry.rows(), gguf.GGMLQuantizationType(number))
    at = np.arange(64, dtype=np.int32)[::-1].copy()
    found = program.run({"at": at})
    np.testing.assert_array_equal(found["rows"].view(np.uint32), wanted[at].view(np.uint32))
    exact = np.tanh(wanted[at].astype(np.float64)) @ wanted.T.astype(np.float64)
    np.testing.assert_allclose(found["y"], exact, rtol=1e-3, atol=1e-4 * abs(exact).max())
    share = SIZES.get(entry.format.name)
    if share is not None:
        assert program.memory({"n": 1})["weight"] <= share * entry.nbytes + 256


def test_factors_of_blocks_are_exact() -> None:
    """A code times a number of f16 has at most 18 bits, and a weight of GGUF rounds once, in its minimum."""
    entry = entry_of(12, 8, 512)
    codes, scales, of_blocks, *_ = (part.make() for part in matrix_parts(entry))
    product = scales.astype(np.float64) * np.repeat(of_blocks.astype(np.float64), 8, axis=0)
    assert (product.astype(np.float32) == product).all()
    weights = codes.astype(np.float64) * np.repeat(product, 32, axis=0)
    assert (weights.astype(np.float32) == weights).all()
