"""Large tensors of files are laid out part by part: the result is the same, and memory holds them once."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.api.compile import plan
from rlx.ir.dtype import F32, LazyArray
from rlx.ir.graph import Graph
from rlx.kernel.layout import Layout
from rlx.kernel.panels import Panels, QuantLayout
from rlx.runtime import derive
from rlx.runtime.derive import lazy_weights


class Tensor:
    """A tensor of a file, and the elements that were read at once."""

    def __init__(self, *shape: int) -> None:
        self.value = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
        self.taken: list[int] = []

    def part(self, start: int, stop: int) -> np.ndarray:
        self.taken.append(stop - start)
        return self.value.reshape(-1)[start:stop].copy()

    def lazy(self) -> LazyArray:
        shape = self.value.shape
        return LazyArray(F32, shape, lambda: self.part(0, self.value.size).reshape(shape), part=self.part)


def weights(graph: Graph, target: str) -> list[bytes]:
    out = []
    lir = plan(graph, target=target)
    for array in lazy_weights(lir, (lir.derived or lir.mir).param_values).values():
        place = np.zeros(array.nbytes, np.uint8)
        array.write_to(place)
        out.append(place.tobytes())
    return out


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [96, 131])
def test_panels_are_laid_out_by_parts(
    columns: int, transposed: bool, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 70
    tensor = Tensor(*((columns, k) if transposed else (k, columns)))

    def graph(value: object) -> Graph:
        g = Graph("product")
        w = g.param("w", tensor.value.shape, "f32", value=value)  # type: ignore[arg-type]
        x = g.input("x", ("n", k), "f32")
        g.output("y", rlx.ops.matmul(x, rlx.ops.transpose(w) if transposed else w))
        return g

    monkeypatch.setattr(derive, "SLAB", 4096)
    lazy = graph(tensor.lazy())
    tensor.taken.clear()
    assert weights(lazy, target) == weights(graph(tensor.value), target)
    widest = 48  # columns of a panel
    assert max(tensor.taken) <= max(4096 // 4, widest * k) and len(tensor.taken) > 3


def test_a_table_is_copied_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Tensor(500, 24)
    g = Graph("lookup")
    g.output(
        "y", rlx.ops.gather(g.param("t", (500, 24), "f32", value=tensor.lazy()), g.input("i", ("n",), "i64"))
    )
    monkeypatch.setattr(derive, "SLAB", 4096)
    assert weights(g, "x86-64-v3") == [tensor.value.tobytes()]
    assert max(tensor.taken) == 1024 and sum(tensor.taken) == tensor.value.size


@pytest.mark.parametrize(
    "layout",
    [
        Panels(37, 53, 16, 8, 1).layout,
        Panels(37, 53, 16, 8, 2).layout,
        Panels(5, 8, 16, 8, 4).layout,
        Layout.parse("3,10 -> 30: 0:3=3@4 0:8=2@12,4@1; 0:3=3@2 8:10=2@1 +24"),
        *QuantLayout(48, 53, bits=4, group=16, lanes=8).layouts,
        *QuantLayout(41, 70, bits=4, group=8, lanes=16, scale="f16").layouts,
        *QuantLayout(48, 53, bits=8, group=16, lanes=8, quads=True).layouts,
        *QuantLayout(88, 53, bits=4, group=8, lanes=8, scale="f16", minimums=True, block=4).layouts,
        *QuantLayout(48, 53, bits=6, group=32, lanes=8, scale="f16").layouts,
        *QuantLayout(41, 70, bits=6, group=16, lanes=4, minimums=True, block=2).layouts,
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", [0, 1])
def test_slabs_give_the_whole(layout: Layout, axis: int) -> None:
    shape = tuple(int(n or 0) for n in layout.sizes)
    x = np.arange(1, 1 + shape[0] * shape[1]).reshape(shape)
    if layout.packed is not None:
        x = (x % 16 - 8 * layout.packed.dtype.is_signed).astype(layout.packed.dtype.np)
    step = layout.slab_step(axis)
    assert step is not None
    for many in (step, 2 * step, 5 * step):
        place = np.zeros_like(layout.pack(x).reshape(-1))
        for first in range(0, shape[axis], many):
            part = np.take(x, range(first, min(first + many, shape[axis])), axis)
            layout.pack_slab(place, part, axis, first)
        np.testing.assert_array_equal(place, layout.pack(x).reshape(-1))


def test_layouts_that_take_no_slabs() -> None:
    assert Layout.parse("i4+8 6,2 -> 6: 0:6=6@2 0:2=2@1").slab_step(1) is None  # a byte has two columns
    set_of_codes = QuantLayout(16, 5, bits=6, group=16, lanes=4).codes  # of all k, and four columns
    assert set_of_codes.slab_step(0) is set_of_codes.slab_step(1) is None
    assert Layout.parse("?,5 -> ?,2,4: 0:5=2@4,4@1").slab_step(1) is None
