"""Schedules: always topological, never worse than the order that came in, near the optimum."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measured import units
from processes import outputs_by_hash_seed
from rlx.errors import PlanError
from rlx.plan.memory.place import Block, lower_bound
from rlx.plan.schedule import Dag, Schedule, lifetimes, live_bytes, peak, schedule


@st.composite
def dags(draw: st.DrawFn, max_nodes: int = 24) -> Dag:
    """Random DAGs with views, in-place results, multi-output nodes, order-only edges and missing sizes."""
    count = draw(st.integers(0, max_nodes))
    nodes = [5 * i + 2 for i in range(count)]
    operands: dict[int, list[int]] = {}
    root_of: dict[int, int] = {}
    after: dict[int, list[int]] = {}
    defines: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        operands[node] = draw(st.lists(st.sampled_from([-1, *nodes[:i]]), max_size=3))
        if i and draw(st.booleans()):
            after[node] = [draw(st.sampled_from(nodes[:i]))]
        sources = [o for o in operands[node] if o in nodes]
        if sources and draw(st.integers(0, 4)) == 0:
            root_of[node] = root_of.get(sources[0], sources[0])
        elif sources and draw(st.integers(0, 6)) == 0:
            defines.setdefault(sources[0], []).append(node)
    sizes = {node: draw(st.integers(0, 1_000)) for node in nodes if draw(st.integers(0, 9))}
    outputs = draw(st.lists(st.sampled_from(nodes), max_size=3)) if nodes else []
    return Dag(nodes, operands, sizes, root_of, defines, after, outputs)


def simulated_peak(dag: Dag, order: tuple[int, ...]) -> int:
    """Lifetimes by the letter: alive from the first to the last step that names the storage."""

    def root(node: int) -> int:
        return dag.root_of.get(node, node)

    named = [
        {root(v) for v in (node, *dag.operands.get(node, ()), *dag.defines.get(node, ()))} for node in order
    ]
    kept = {root(node) for node in dag.outputs}
    best = 0
    for step in range(len(order)):
        begun = set().union(*named[: step + 1])
        needed = set().union(*named[step:]) | kept
        best = max(best, sum(dag.sizes.get(r, 0) for r in begun & needed if r in dag.nodes))
    return best


def assert_topological(dag: Dag, order: tuple[int, ...]) -> None:
    assert sorted(order) == sorted(dag.nodes)
    step = {node: n for n, node in enumerate(order)}
    for node in order:
        for needed in (*dag.operands.get(node, ()), *dag.after.get(node, ())):
            assert needed not in step or step[needed] < step[node]


def optimal_peak(dag: Dag) -> int:
    """The least peak of all orders: a minimax shortest path over sets of finished nodes."""
    position = {node: i for i, node in enumerate(dag.nodes)}
    needs = [sum(1 << position[o] for o in set(dag.operands.get(n, ()))) for n in dag.nodes]
    users = {n: 1 << position[n] for n in dag.nodes}
    for node in dag.nodes:
        for operand in dag.operands.get(node, ()):
            users[operand] |= 1 << position[node]
    kept = set(dag.outputs)
    best, queue = {0: 0}, [(0, 0)]
    while queue:
        highest, finished = heapq.heappop(queue)
        if finished == (1 << len(dag.nodes)) - 1:
            return highest
        if highest > best[finished]:
            continue
        for i in range(len(dag.nodes)):
            if finished >> i & 1 or needs[i] & ~finished:
                continue
            then = finished | 1 << i
            alive = sum(
                dag.sizes[n] for n, mask in users.items() if mask & then and (n in kept or mask & ~finished)
            )
            if max(highest, alive) < best.get(then, 1 << 60):
                best[then] = max(highest, alive)
                heapq.heappush(queue, (best[then], then))
    return 0


def random_dag(count: int, chance: random.Random) -> Dag:
    operands = {
        i: sorted({max(0, i - 1 - int(chance.expovariate(0.4))) for _ in range(chance.choice((1, 1, 2)))})
        for i in range(1, count)
    }
    read = {o for reads in operands.values() for o in reads}
    sizes = {i: 1 + int(2 ** chance.uniform(0, 8)) for i in range(count)}
    return Dag(range(count), operands, sizes, outputs=[i for i in range(count) if i not in read])


@given(dags())
def test_schedules_are_topological_and_never_worse(dag: Dag) -> None:
    best = schedule(dag)
    assert_topological(dag, best.order)
    assert best.peak == peak(dag, best.order) == simulated_peak(dag, best.order)
    assert best.given_peak == peak(dag) == simulated_peak(dag, tuple(dag.nodes))
    assert best.peak <= best.given_peak
    spans = lifetimes(dag, best.order)
    assert best.peak == lower_bound(Block(root, dag.sizes[root], *spans[root], alignment=1) for root in spans)
    if best.peak == best.given_peak:
        assert best.order == tuple(dag.nodes) and best.heuristic == "given order"


def test_near_the_optimum_on_small_graphs() -> None:
    chance = random.Random(11)
    ratios, given = [], []
    for _ in range(40):
        dag = random_dag(12, chance)
        best, optimum = schedule(dag), optimal_peak(dag)
        assert best.peak >= optimum
        ratios.append(best.peak / optimum)
        given.append(best.given_peak / optimum)
    assert sum(given) / 40 > 1.05  # the task is not trivial
    assert sum(ratios) / 40 <= 1.01


def test_branches_run_one_after_the_other() -> None:
    # Eight branches of one source, written breadth first: each makes 1,000 bytes and boils them down to 10.
    wide, narrow = range(1, 9), range(9, 17)
    dag = Dag(
        nodes=range(18),
        operands={**{w: [0] for w in wide}, **{n: [n - 8] for n in narrow}, 17: list(narrow)},
        sizes={0: 100, **dict.fromkeys(wide, 1_000), **dict.fromkeys(narrow, 10), 17: 10},
        outputs=(17,),
    )
    best = schedule(dag)
    assert best.given_peak == 8_100
    assert best.peak == 100 + 1_000 + 7 * 10  # the source dies with its last reader
    assert best.order[1:5] == (1, 9, 2, 10)


def test_storage_of_views_and_results_counts_once_and_from_its_writer() -> None:
    # 1 writes the storage of its results 2 and 3; 4 is a view of 2 and keeps it alive.
    dag = Dag(
        nodes=(1, 2, 3, 4, 5),
        operands={2: [1], 3: [1], 4: [2], 5: [4]},
        sizes={2: 100, 3: 10, 5: 1},
        root_of={4: 2},
        defines={1: (2, 3)},
    )
    assert live_bytes(dag) == [110, 110, 110, 100, 101]
    assert lifetimes(dag) == {2: (0, 4), 3: (0, 2), 5: (4, 4)}
    assert lifetimes(dag, (1, 3, 2, 4, 5)) == {2: (0, 4), 3: (0, 1), 5: (4, 4)}


def test_order_only_edges_are_kept() -> None:
    # 2 would rather run before 1, but must not overwrite what 1 still reads.
    dag = Dag((0, 1, 2, 3), {1: [0], 2: [0], 3: [1, 2]}, {0: 1_000, 1: 900, 2: 1}, after={2: [1]})
    assert schedule(dag).order == (0, 1, 2, 3)


def test_a_chain_keeps_its_order() -> None:
    dag = Dag(range(50), {i: [i - 1] for i in range(1, 50)}, {i: 1 + i % 7 for i in range(50)}, outputs=(49,))
    assert schedule(dag) == Schedule(tuple(range(50)), 13, 13, "given order")


def test_an_empty_graph() -> None:
    assert schedule(Dag((), {}, {})) == Schedule((), 0, 0, "given order")


def test_a_thousand_nodes_take_milliseconds() -> None:
    dag = random_dag(1_000, random.Random(3))
    # Some 40 ms on an idle machine, about as many units; this only catches a wrong order of growth.
    assert units(lambda: schedule(dag), rounds=3) < 250


def test_the_same_order_in_every_process() -> None:
    script = (
        "from rlx.plan.schedule import Dag, schedule\n"
        "ops = {i: {(i * 7) % i, (i * 13 + 5) % i} for i in range(1, 120)}\n"
        "print(schedule(Dag(range(120), ops, {i: i * 37 % 101 for i in range(120)}, outputs={119, 80})))"
    )
    assert len(outputs_by_hash_seed(script)) == 1


def test_orders_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="node 1 comes before node 2, which it needs"):
        schedule(Dag((1, 2), {1: [2]}, {}))
    with pytest.raises(PlanError, match="node 4 is listed twice"):
        schedule(Dag((4, 4), {}, {}))
    dag = Dag((1, 2, 3), {2: [1]}, {1: 8})
    with pytest.raises(PlanError, match="node 2 comes before node 1"):
        peak(dag, (2, 1, 3))
    with pytest.raises(PlanError, match="node 3 is not in both the graph and the order"):
        live_bytes(dag, (1, 2))
