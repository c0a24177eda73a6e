"""Predicted IO of graphs: launches, host waits, bytes; at assumed sizes; only what is live."""

from __future__ import annotations

from typing import Any

import pytest

import rlx
from rlx import ops
from rlx.cost import assumed_binding, host_sync_op_kinds, profile_graph_io, profile_graph_io_outputs
from rlx.cost.profile import GraphIoProfile
from rlx.errors import VerifyError
from rlx.ir.dim import Constraint, sym
from rlx.ir.graph import Graph, Node

F32 = 4


def graph(**inputs: tuple[Any, ...]) -> tuple[Graph, list[Node]]:
    g = rlx.Graph("io")
    return g, [g.input(name, shape, "f32") for name, shape in inputs.items()]


def test_a_node_reads_its_operands_and_writes_its_result() -> None:
    g, (x, w) = graph(x=(8, 16), w=(16, 4))
    g.output("y", x @ w)
    traffic = (8 * 16 + 16 * 4 + 8 * 4) * F32
    assert profile_graph_io(g) == GraphIoProfile(1, 0, 8 * 4 * F32, traffic)


def test_views_cost_no_launch_but_are_read_back() -> None:
    g, (x,) = graph(x=(8, 16))
    g.output("y", ops.transpose(x))
    assert profile_graph_io(g) == GraphIoProfile(0, 0, 8 * 16 * F32, 0)


def test_a_reshape_that_must_move_elements_is_a_launch() -> None:
    g, (x,) = graph(x=(8, 16))
    g.output("y", ops.reshape(ops.transpose(x), (128,)))
    assert profile_graph_io(g) == GraphIoProfile(1, 0, 512, 1024)


def test_a_broadcast_is_read_once() -> None:
    g, (x, v) = graph(x=(100, 16), v=(16,))
    g.output("y", x + ops.broadcast_to(v, (100, 16)))
    assert profile_graph_io(g).device_traffic_bytes == (1600 + 16 + 1600) * F32


def test_dead_nodes_cost_nothing() -> None:
    g, (x,) = graph(x=(8, 8))
    ops.exp(x)
    g.output("y", ops.tanh(x))
    assert profile_graph_io(g).kernel_launches == 1


def test_a_gather_pays_for_the_rows_it_reads() -> None:
    g = rlx.Graph("io")
    table = g.param("table", (30_000, 64), "f32")
    ids = g.input("ids", (5,), "i64")
    g.output("y", ops.take(table, ids, axis=0))
    rows = 5 * 64 * F32
    traffic = profile_graph_io(g).device_traffic_bytes
    assert 2 * rows < traffic <= 2 * rows + 5 * 8


def test_an_embedding_block_pays_for_its_rows_too() -> None:
    g = rlx.Graph("io")
    table = g.param("table", (30_000, 64), "f32")
    g.output("y", ops.embedding(table, g.input("ids", (5,), "i64")))
    assert profile_graph_io(g).device_traffic_bytes < 3 * 5 * 64 * F32


def test_a_slice_is_read_in_part() -> None:
    g, (x,) = graph(x=(1000, 16))
    g.output("y", ops.exp(x[:10]))
    assert profile_graph_io(g).device_traffic_bytes == 2 * 160 * F32


def test_loop_bodies_count_once_per_trip() -> None:
    def looped(steps: int) -> GraphIoProfile:
        g, (x,) = graph(x=(steps, 8))
        start = g.constant(0.0)
        carry, _ = ops.scan(lambda c, row: (c + ops.sum(row), ops.exp(row)), start, x)
        g.output("y", carry)
        return profile_graph_io(g) - GraphIoProfile(host_output_bytes=F32)

    assert looped(20) == looped(10) * 2
    assert looped(10).kernel_launches == 20 or looped(10).kernel_launches == 30


def test_symbols_are_billed_at_their_assumed_sizes() -> None:
    g, (x,) = graph(x=("batch", "seq", 8))
    g.output("y", ops.exp(x))
    assert assumed_binding(g) == {"batch": 1, "seq": 128}
    assert profile_graph_io(g).host_output_bytes == 128 * 8 * F32
    assert profile_graph_io(g, {"batch": 4, "seq": 2}).host_output_bytes == 4 * 2 * 8 * F32


def test_a_symbol_that_is_not_only_leading_is_no_batch() -> None:
    g, (x, y) = graph(x=("n", 8), y=(3, "n"))
    g.output("a", ops.exp(x))
    g.output("b", ops.exp(y))
    assert assumed_binding(g) == {"n": 128}


def test_what_a_graph_assumes_about_a_symbol_is_its_size() -> None:
    g, (x, y) = graph(x=(7, 8), y=("n", 8))
    g.output("y", x + y)
    assert assumed_binding(g) == {"n": 7}


def test_assumed_sizes_keep_what_a_graph_assumes() -> None:
    """128 would break the assumption; a plan for such sizes is refused when it is loaded."""
    g, (x, y) = graph(x=("n", 8), y=(3, "m"))
    g.output("a", ops.exp(x))
    g.output("b", ops.exp(y))
    g.assume(Constraint("eq", (sym("m") + 64) // 128, 3, ()))
    assert assumed_binding(g) == {"n": 1, "m": 320}
    assert assumed_binding(g, {"m": 128}) == {"n": 1, "m": 128}  # what is asked for stays
    g, (x, y) = graph(x=("n", 8), y=(3, "m"))
    g.output("a", ops.exp(x))
    g.output("b", ops.exp(y))
    g.assume(Constraint("eq", sym("m"), 2 * sym("n"), ()))
    assert assumed_binding(g) == {"n": 1, "m": 2}


def test_only_the_outputs_that_are_asked_for() -> None:
    g, (x,) = graph(x=(8, 8))
    a, b = ops.exp(x), ops.tanh(x)
    g.output("a", a)
    g.output("b", ops.abs(b))
    assert profile_graph_io_outputs(g, [a.id]) == GraphIoProfile(1, 0, 256, 512)
    both = profile_graph_io_outputs(g, [n.id for n in g.outputs.values()])
    assert both == profile_graph_io(g)
    with pytest.raises(VerifyError, match="no node %77"):
        profile_graph_io_outputs(g, [77])


def test_host_ops_are_the_backends_claim() -> None:
    assert host_sync_op_kinds("nothing native") == {"custom", "log_mel", "log_mel_backward", "welch_peaks"}
    assert host_sync_op_kinds("cpu") == {"custom"}
