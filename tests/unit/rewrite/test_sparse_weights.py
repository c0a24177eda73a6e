"""Which weights are sparse is found without reading more of a file than that takes."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.ir.dtype import F32, LazyArray
from rlx.ir.graph import Graph
from rlx.rewrite.sparse import MOST_DENSE, find_sparse_weights

ROWS, COLUMNS = 1024, 256


def product(value: np.ndarray, transposed: bool) -> tuple[Graph, list[int]]:
    """x @ w with a weight that is read from a file, and how many elements were read each time."""
    taken: list[int] = []

    def part(start: int, stop: int) -> np.ndarray:
        taken.append(stop - start)
        return value.reshape(-1)[start:stop]

    lazy = LazyArray(F32, value.shape, lambda: part(0, value.size).reshape(value.shape), part=part)
    g = Graph("product")
    w = g.param("w", value.shape, "f32", value=lazy)
    k = value.shape[1 if transposed else 0]
    x = g.input("x", ("n", k), "f32")
    g.output("y", rlx.ops.matmul(x, rlx.ops.transpose(w) if transposed else w))
    return rlx.optimize(g), taken


@pytest.mark.parametrize("transposed", [False, True])
def test_a_dense_weight_shows_in_its_first_rows(transposed: bool) -> None:
    graph, taken = product(np.ones((ROWS, COLUMNS), np.float32), transposed)
    taken.clear()
    assert find_sparse_weights(graph) is graph
    assert MOST_DENSE * ROWS * COLUMNS < sum(taken) <= (MOST_DENSE + 0.1) * ROWS * COLUMNS


@pytest.mark.parametrize("transposed", [False, True])
def test_a_sparse_weight_in_a_file_is_found(transposed: bool) -> None:
    value = np.zeros((ROWS, COLUMNS), np.float32)
    value[::40, ::3] = 1.5
    graph, _ = product(value, transposed)
    found = [n for n in find_sparse_weights(graph).nodes if n.op.name == "pack_sparse"]
    assert [n.attrs["room"] for n in found] == [np.count_nonzero(value)]


def test_a_view_that_repeats_elements_is_counted_as_it_is() -> None:
    """One row, broadcast: the elements of the file are not those of the matrix."""
    row = np.zeros((1, COLUMNS), np.float32)
    row[0, :200] = 1
    g = Graph("repeated")
    lazy = LazyArray(F32, row.shape, lambda: row, part=lambda start, stop: row.reshape(-1)[start:stop])
    w = rlx.ops.broadcast_to(g.param("w", row.shape, "f32", value=lazy), (ROWS, COLUMNS))
    g.output("y", rlx.ops.matmul(g.input("x", ("n", ROWS), "f32"), w))
    graph = rlx.optimize(g)
    assert find_sparse_weights(graph) is graph
