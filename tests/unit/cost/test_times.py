"""Predicted times of kernels: what makes them longer, and how near they are to times that were measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from op_cases import ALL_CASES, Case

import rlx
from emission import first_cases
from rlx import ops
from rlx.api.compile import plan
from rlx.cost.time.owners import Box, Owners, Share
from rlx.cost.time.work import Setting, Traffic, Work, kernel_ps, slowest
from rlx.ir.graph import Graph, Node
from rlx.plan.kernel_costs import priced_costs
from rlx.plan.predict import costs_of_steps, kernel_costs, predicted_steps
from rlx.target.cpu import resolve, targets, web_targets
from rlx.target.rates import RATES
from timed_programs import PROGRAMS, V3, V4, Timed

NEAR, FAR = 2.0, 5.0
EXACT = ("norm over channels behind a reshape", "concatenation and product", "norm of rows", "matmul")


def factor(a: float, b: float) -> float:
    return max(a / b, b / a)


@pytest.mark.parametrize("target", [V4, V3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_times_that_were_measured_are_predicted(name: str, target: str) -> None:
    timed = PROGRAMS[name]
    limit = NEAR if name in EXACT else FAR
    assert factor(timed.predicted(target), timed.took[target]) < limit


def took(shape: tuple[int, ...], body: Callable[[Node], Node], target: str = V3) -> float:
    return Timed(shape, body, {}).predicted(target)


@pytest.mark.parametrize(
    "body",
    [
        ops.tanh,
        lambda x: ops.softmax(x, axis=-1),
        lambda x: ops.sum(x, axis=0),
        lambda x: x @ ops.transpose(x, (1, 0)),
        lambda x: ops.sort(x, axis=1),
        lambda x: ops.cumsum(x, axis=1),
    ],
)
def test_more_rows_take_longer(body: Callable[[Node], Node]) -> None:
    times = [took((rows, 512), body) for rows in (32, 128, 512, 2048)]
    assert times == sorted(times) and times[-1] > 8 * times[0]


def test_a_convolution_takes_longer_with_more_channels_and_pixels() -> None:
    def convolved(channels: int, pixels: int) -> float:
        def body(x: Node) -> Node:
            return ops.conv(x, x[:, :, :3, :3], padding=((1, 1), (1, 1)))

        return took((1, channels, pixels, pixels), body)

    assert convolved(16, 28) < convolved(32, 28) < convolved(32, 56) < convolved(64, 56)


def test_strided_reads_are_dearer_than_neighbours() -> None:
    near = took((512, 2048), lambda x: x[:, :1024] * 2.0)
    strided = took((512, 2048), lambda x: x[:, ::2] * 2.0)
    assert strided > 1.5 * near


def test_columns_are_dearer_than_rows_where_sets_of_caches_are_few() -> None:
    rows = took((4096, 320), lambda x: ops.sum(x * x, axis=1))
    behind = took((320, 4096), lambda x: ops.sum(ops.transpose(x * x, (1, 0)), axis=1))
    assert behind > rows


def test_a_dear_function_is_dearer_than_a_product() -> None:
    assert took((4096,), ops.tanh) > 2 * took((4096,), lambda x: x * 2.0)


def test_what_exceeds_the_caches_comes_from_memory() -> None:
    """A byte of a value beyond L3 takes several times as long as one of a value within L2."""
    small, large = took((1 << 14,), lambda x: x * 2.0), took((1 << 25,), lambda x: x * 2.0)
    assert large / (1 << 25) > 3 * small / (1 << 14)


def test_a_launch_is_the_least_that_a_kernel_takes() -> None:
    for target in (*targets(), *web_targets()):
        assert took((1,), lambda x: x * 2.0, target.name) * 1e6 >= RATES[target.name].launch_ps


def test_every_named_target_has_rates() -> None:
    assert RATES.keys() == {target.name for target in (*targets(), *web_targets())}
    assert resolve(V3).rates is RATES[V3]


def test_threads_share_whole_units() -> None:
    assert [Work(units=units).speedup(2) for units in (1, 2, 3, 4)] == [1.0, 2.0, 1.5, 2.0]


def test_the_slowest_of_levels_decides() -> None:
    rates = resolve(V3).rates
    computing = Work(compute_ps=1e9, traffic=[Traffic(0, 1000.0)])
    moving = Work(compute_ps=1e3, traffic=[Traffic(0, 1e9)])
    assert kernel_ps(rates, computing, [{"l1": 1.0}], 1, 0.0) == pytest.approx(1e9, rel=1e-3)
    levels = [kernel_ps(rates, moving, [{cache: 1.0}], 1, 0.0) for cache in ("l1", "l2", "l3", "memory")]
    assert levels == sorted(levels) and levels[-1] > 4 * levels[0]
    strided = Work(traffic=[Traffic(0, 1e9, strided=True)])
    assert kernel_ps(rates, strided, [{"l3": 1.0}], 1, 0.0) > 2 * levels[2]
    assert slowest([]) == 0.0


def test_lines_that_another_core_has_are_fetched_once() -> None:
    owners, matrix = Owners(), Box(0, (64, 64), (1024, 16), 16)
    by_rows, by_columns, quarter = Share(1024, 64), Share(16, 64), 64 * 1024 / 4

    def touched(
        share: Share, written: bool, now: float, kept: float = 1e9
    ) -> tuple[list[float], list[float]]:
        met = owners.touch("a", matrix, share, 2, written, now, kept)
        return met.fetched.tolist(), met.taken.tolist()

    nothing, half = [0.0, 0.0], [quarter, quarter]
    assert touched(by_rows, True, 0.0) == (nothing, nothing)
    assert touched(by_columns, False, 1.0) == (half, nothing)  # half of what the other one has written
    assert touched(by_columns, False, 2.0) == (nothing, nothing)
    assert touched(by_columns, True, 3.0) == (nothing, nothing)  # changed lines have come with all rights
    assert touched(by_rows, True, 4.0) == (half, nothing)  # changed by the other: fetched
    assert touched(by_columns, True, 5.0, 0.5) == (nothing, nothing)  # nobody has it any more


def test_writing_what_both_have_read_takes_lines_away() -> None:
    """The first thread writes; after both have read its lines, a write by any of them is slow, once."""
    owners, row, halves = Owners(), Box(0, (1024,), (4,), 4), Share(4, 1024)
    owners.touch("a", row, halves, 2, True, 0.0, 1e9)
    both = owners.touch("a", row, Share(), 2, False, 1.0, 1e9)
    assert both.fetched.tolist() == [2048.0, 2048.0] and not both.taken.any()
    assert owners.touch("a", row, halves, 2, True, 2.0, 1e9).taken.tolist() == [2048.0, 2048.0]
    assert not owners.touch("a", row, halves, 2, True, 3.0, 1e9).taken.any()


def test_a_part_of_a_concatenation_is_of_the_thread_at_its_place() -> None:
    owners, part = Owners(), Box(0, (64,), (256,), 256)
    owners.touch("a", part, Share(256, 64), 2, True, 0.0, 1e9)
    second = owners.touch("a", part, Share(256, 128, 64), 2, False, 1.0, 1e9)
    assert second.fetched.tolist() == [0.0, 8192.0]  # all of it is read by the second thread


def test_lines_that_only_another_core_has_read_are_no_copies() -> None:
    """A write of what one other core has fetches it; only copies of several are taken away."""
    owners, row = Owners(), Box(0, (1024,), (4,), 4)
    owners.touch("a", row, Share(), 1, True, 0.0, 1e9)
    owners.touch("a", row, Share(), 1, False, 1.0, 1e9, first=1)
    met = owners.touch("a", row, Share(), 1, True, 2.0, 1e9)
    assert met.fetched.tolist() == [4096.0] and not met.taken.any()


def test_of_an_odd_number_of_units_the_later_threads_have_more() -> None:
    owners, rows = Owners(), Box(0, (3, 1024), (1024, 1), 1)
    owners.touch("a", rows, Share(), 1, True, 0.0, 1e9)  # all by the first thread
    assert owners.touch("a", rows, Share(1024, 3), 2, False, 1.0, 1e9).fetched.tolist() == [0.0, 2048.0]


def test_a_program_with_little_work_is_of_one_thread() -> None:
    """Its kernels would be shared in a program with more to do: a row takes half as long there."""

    def row(rows: int) -> float:
        return took((rows, 64), lambda x: ops.sum(x, axis=1), V4) / rows

    assert row(1024) > 1.8 * row(16384)


def test_kernels_of_one_vector_of_channels_are_reduced_side_by_side() -> None:
    """Sums over pixels of blocked channels wait for one addition after the other, unless others are near
    them: four rows of channels take as long as one."""

    def pooled(rows: int) -> float:
        return took((rows, 1024, 16), lambda x: ops.sum(x, axis=1), V4)

    assert pooled(8) < 2 * pooled(2)


def test_padding_that_is_left_out_takes_no_time() -> None:
    """A depthwise convolution of small planes with large windows computes what is inside."""

    def convolved(padding: int) -> float:
        g = Graph("depthwise")
        x, w = g.input("x", (1, 64, 6, 64), "f32"), g.param("w", (64, 1, 5, 5), "f32")
        padded = ((padding, padding), (padding, padding))
        y = ops.conv(ops.tanh(x), w, padding=padded, groups=64)
        g.output("y", ops.tanh(y))
        return max(step.picoseconds for step in predicted_steps(plan(g, target=V4)).values())

    assert convolved(2) < 3.2 * convolved(0)  # three times as many lines, of which each has fewer elements


def test_weights_that_nobody_has_read_for_long_have_left_what_others_share() -> None:
    """A matmul of one row takes longer in a program that runs for longer, though its weights fit L3."""

    def product(rows: int) -> int:
        g = Graph("behind")
        w, v = g.param("w", (1024, 1024), "f32"), g.param("v", (512, 2048), "f32")
        g.output("x", g.input("x", (rows, 1024), "f32") @ w)
        g.output("y", g.input("y", (1, 512), "f32") @ v)
        return list(predicted_steps(plan(g, target=V4)).values())[-1].picoseconds

    assert product(2048) > 1.5 * product(8)


def test_a_map_whose_batch_only_the_run_knows_is_of_one_thread() -> None:
    """A batch of 1 is the only axis that threads share, as the padded one is read in pieces."""

    def padded(batch: int | str) -> float:
        g = Graph("padded")
        x = g.input("x", (batch, 1 << 16), "f32")
        g.output("y", ops.tanh(ops.pad(x, ((0, 0), (64, 64)))))
        (step,) = predicted_steps(plan(g, target=V4, assume={"n": 1} if batch == "n" else {})).values()
        return step.picoseconds

    assert padded("n") > 1.5 * padded(1)


def test_rows_of_a_table_in_panels_cost_what_is_read() -> None:
    def chosen(rows: int) -> float:
        g = Graph("chosen")
        table = g.param("table", (rows, 256), "f32")
        x = ops.gather(table, g.input("i", (16,), "i64"), axis=0)
        g.output("y", x @ ops.transpose(table, (1, 0)))
        first, *_ = predicted_steps(plan(g, target=V4)).values()
        return first.picoseconds

    assert chosen(1 << 14) < 2 * chosen(1 << 12)


def test_weights_that_nothing_is_computed_next_to_add_up() -> None:
    rates = resolve(V3).rates
    levels = [{"memory": 1.0}]
    beside, in_turns = (
        kernel_ps(rates, Work(compute_ps=1e9, traffic=[Traffic(0, 2.2e7, waits=waits)]), levels, 1, 0.0)
        for waits in (False, True)
    )
    assert beside < 1.5e9 < 1.9e9 < in_turns


def test_loads_of_a_long_window_cross_lines_of_the_cache() -> None:
    """A wide vector crosses a line with every load of a window's element, half a vector with every other."""

    def body(x: Node) -> Node:
        return ops.conv(x, x[:, :, :256])

    wide, narrow = (took((1, 1, 16384), body, target) for target in (V4, V3))
    assert 1.2 < narrow / wide < 1.8


def test_a_norm_behind_a_product_waits_for_the_other_core() -> None:
    """Threads share columns of a matmul and rows of a norm: half of what the norm reads is the other's."""

    def alone(x: Node) -> Node:
        return ops.softmax(x, axis=-1)

    g = Graph("behind")
    x = g.input("x", (128, 768), "f32")
    w = g.param("w", (768, 768), "f32")
    g.output("y", alone(x @ w))
    *_, behind = predicted_steps(plan(g, target=V4)).values()
    assert behind.picoseconds / 1e6 > took((128, 768), alone, V4)


def test_loops_take_as_long_as_their_bodies_and_trips() -> None:
    def repeated(steps: int) -> float:
        g = Graph("scan")
        xs = g.input("xs", (steps, 64), "f32")
        start = g.input("start", (64,), "f32")

        def step(carry: Node, x: Node) -> tuple[Node, Node]:
            new = ops.tanh(carry + x)
            return new, new

        last, _ = ops.scan(step, start, xs)
        g.output("y", last)
        return sum(t.picoseconds for t in predicted_steps(plan(g, target=V3)).values()) / 1e6

    assert repeated(400) > 3 * repeated(100)


def test_sizes_of_a_plan_decide() -> None:
    g = Graph("symbolic")
    g.output("y", ops.tanh(g.input("x", ("n", 64), "f32")))
    module = plan(g, target=V3)
    times = [costs_of_steps(module.specialize({"n": n})) for n in (8, 80, 800)]
    steps = [sum(c.picoseconds for c in costs) for found in times for costs in found.values()]
    assert steps == sorted(steps) and steps[-1] > 5 * steps[0]


def test_plans_are_made_by_prices_alone() -> None:
    """Rates follow machines; the numbers that plans are made by do not."""
    g = Graph("priced")
    g.output("y", ops.tanh(g.input("x", (64, 64), "f32")))
    (priced,) = priced_costs(plan(g, target=V3))
    assert priced.picoseconds == 200_000 + max(2 * 64 * 64 * 4 * 1000 // 25, 15 * 16 * 64 * 64)


def test_explain_prints_what_was_measured_next_to_what_was_predicted() -> None:
    g = Graph("rows")
    g.output("y", ops.softmax(g.input("x", ("n", 64), "f32") * 2.0))
    page = rlx.compile(g).explain(measure=True, binding={"n": 32})
    head, row = (
        next(i for i, t in enumerate(page.splitlines()) if w in t) for w in ("measured    moved", "reduce:")
    )
    assert head < row and "Measured" in page
    assert len([w for w in page.splitlines()[row].split() if w in ("ns", "us", "ms")]) == 2
    assert "measured" not in rlx.compile(g).explain(binding={"n": 32})


def test_settings_number_results_after_operands() -> None:
    at = Setting(resolve(V3), lambda d: int(str(d)), ((1,), (1,)), (4, 8, 16), (4, 4, 4))
    assert at.operands == 2 and at.lanes == 8


def all_times(case: Case) -> list[int]:
    graph, _ = case.graph()
    return [cost.picoseconds for cost in kernel_costs(plan(graph, target=V3))]


def test_every_op_has_a_time() -> None:
    """Also ops that only the host computes, and storage with several operands."""
    several = [case for case in ALL_CASES if case.id in ("store_as-18", "loop-2")]
    assert len(several) == 2
    for case in (*first_cases().values(), *several):
        assert all(time >= 0 for time in all_times(case)), case.id


@pytest.mark.slow
def test_every_sample_of_every_op_has_a_time() -> None:
    for case in ALL_CASES:
        assert all(time >= 0 for time in all_times(case)), case.id
