"""Products with sparse constant matrices against dense ones: any shape, both sides,
non-finite rows, epilogues.
"""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from machines import to_execute
from rlx import ops
from rlx.errors import InputError
from rlx.ir.graph import Node
from rlx.ops.storage.sparse import SparseColumns


def filters(k: int, n: int, kind: type = np.float32, density: float = 0.05) -> np.ndarray:
    rng = np.random.default_rng(k * n)
    return (rng.standard_normal((k, n)) * (rng.random((k, n)) < density)).astype(kind)


def compiled(build, w: np.ndarray, shape, threads: int = 1, target: str = "host"):
    g = rlx.Graph("sparse")
    name = {"float32": "f32", "float64": "f64"}[w.dtype.name]
    x = g.input("x", shape, name)
    p = g.param("w", w.shape, name)
    g.set_param("w", w)
    with g.building():
        g.output("y", build(x, p))
    program = rlx.compile(g, threads=threads, target=target, cache=False)
    assert program.stats["host_thunks"] == []
    assert any(n.op.name == "unpack_sparse" for r in program.graph.nodes for b in r.bodies for n in b.nodes)
    return program


def close(got: np.ndarray, want: np.ndarray) -> None:
    scale = 1e-5 if want.dtype == np.float32 else 1e-13
    np.testing.assert_allclose(got, want, rtol=scale, atol=scale * 10)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [(5,), (16,), (3, 7), (33,)])
@pytest.mark.parametrize(("k", "n"), [(201, 80), (300, 5), (5, 300), (64, 33), (17, 96)])
def test_is_the_dense_product(k: int, n: int, rows: tuple[int, ...], kind: type) -> None:
    w = filters(k, n, kind)
    x = np.random.default_rng(1).standard_normal((*rows, k)).astype(kind)
    close(compiled(lambda x, w: ops.matmul(x, w), w, x.shape)(x), x @ w)


@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3"])
def test_on_other_targets(target: str) -> None:
    w, x = filters(201, 80), np.random.default_rng(1).standard_normal((21, 201)).astype(np.float32)
    close(compiled(lambda x, w: ops.matmul(x, w), w, x.shape, target=to_execute(target))(x), x @ w)


def test_symbolic_rows_and_threads_give_the_same_bits() -> None:
    w = filters(201, 80)

    def build(x: Node, w: Node) -> Node:
        return ops.log(ops.maximum(ops.matmul(x, w), 1e-10))

    one, two = (compiled(build, w, ("n", 201), threads) for threads in (1, 2))
    for rows in (0, 1, 15, 16, 17, 100):
        x = np.random.default_rng(rows).random((rows, 201)).astype(np.float32)
        np.testing.assert_array_equal(one(x), two(x))
        # Not the logarithms: near 0 a sum loses digits, and they show how many.
        close(np.exp(one(x)), np.maximum(x @ w, np.float32(1e-10)))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_unpacking_undoes_packing(kind: type) -> None:
    w = filters(30, 7, kind)
    columns = SparseColumns(30, 7, np.count_nonzero(w) + 3, w.dtype)
    np.testing.assert_array_equal(columns.unpack(columns.pack(w)), w)


def test_a_sparse_matrix_on_the_left() -> None:
    w = filters(80, 201)
    x = np.random.default_rng(2).standard_normal((201, 50)).astype(np.float32)
    close(compiled(lambda x, w: ops.matmul(w, x), w, x.shape)(x), w @ x)


def test_a_transposed_operand_is_read_in_place() -> None:
    w = filters(201, 80)
    x = np.random.default_rng(2).standard_normal((201, 50)).astype(np.float32)
    close(compiled(lambda x, w: ops.matmul(ops.transpose(x), w), w, x.shape)(x), x.T @ w)


def test_zeros_meet_infinities() -> None:
    w = filters(201, 80)
    x = np.random.default_rng(3).random((40, 201)).astype(np.float32)
    x[3, 17], x[20, 100], x[39, 200] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        want = x @ w
    np.testing.assert_allclose(
        compiled(lambda x, w: ops.matmul(x, w), w, x.shape)(x), want, rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_another_value_of_the_weight() -> None:
    w, x = filters(201, 80), np.random.default_rng(1).standard_normal((21, 201)).astype(np.float32)
    program = compiled(lambda x, w: ops.matmul(x, w), w, x.shape)
    fewer = w * (w > 0)
    program.set_param("w", fewer)
    close(program(x), x @ fewer)
    with pytest.raises(InputError, match="compile the program again"):
        program.set_param("w", filters(201, 80, density=0.2))


def test_dense_and_small_matrices_stay_dense() -> None:
    for w in (filters(201, 80, density=0.3), filters(20, 20)):
        with pytest.raises(AssertionError):
            compiled(lambda x, w: ops.matmul(x, w), w, (32, w.shape[0]))
