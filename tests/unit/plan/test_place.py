"""Placement: never an overlap, never below the bound, at the bound for shapes that models have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processes import outputs_by_hash_seed
from rlx.errors import PlanError
from rlx.plan.memory.place import Block, check_placement, lower_bound, place, replay

spans = st.tuples(st.integers(0, 30), st.integers(0, 12))
sizes = st.integers(0, 5_000)


@st.composite
def block_lists(draw: st.DrawFn, alignments: tuple[int, ...] = (64,)) -> list[Block]:
    shapes = draw(st.lists(st.tuples(spans, sizes, st.sampled_from(alignments)), max_size=25))
    return [
        Block(10 * key + 3, size, first, first + length, alignment)
        for key, ((first, length), size, alignment) in enumerate(shapes)
    ]


def bytes_alive(blocks: list[Block]) -> int:
    """The bound by brute force, step by step."""
    return max((sum(b.room for b in blocks if b.first <= t <= b.last) for t in range(64)), default=0)


def assert_disjoint(blocks: list[Block], offsets: dict[int, int]) -> None:
    """The rule itself, written without the code under test."""
    for n, a in enumerate(blocks):
        for b in blocks[:n]:
            if a.first <= b.last and b.first <= a.last and a.size and b.size:
                start_a, start_b = offsets[a.key], offsets[b.key]
                assert start_a + a.size <= start_b or start_b + b.size <= start_a, (a, b, offsets)


@given(block_lists())
def test_placements_are_disjoint_aligned_and_not_below_the_bound(blocks: list[Block]) -> None:
    plan = place(blocks, search_looks=2_000)
    assert_disjoint(blocks, plan.offsets)
    check_placement(blocks, plan.offsets, plan.total)
    assert plan.lower_bound == lower_bound(blocks) == bytes_alive(blocks)
    assert plan.total >= plan.lower_bound
    assert plan.total <= sum(b.room for b in blocks)
    assert sorted(plan.order) == [b.key for b in blocks]


@given(block_lists(alignments=(1, 64, 256, 4096)))
def test_mixed_alignments(blocks: list[Block]) -> None:
    plan = place(blocks, search_looks=2_000)
    assert_disjoint(blocks, plan.offsets)
    assert all(plan.offsets[b.key] % b.alignment == 0 for b in blocks)
    assert plan.total >= plan.lower_bound == bytes_alive(blocks)


@given(block_lists(), st.data())
def test_replay_is_valid_for_any_sizes(blocks: list[Block], data: st.DataObject) -> None:
    plan = place(blocks, search_looks=2_000)
    again = replay(plan.order, blocks)
    assert (again.total, again.offsets) == (plan.total, plan.offsets)
    resized = [replace(b, size=data.draw(sizes)) for b in blocks]
    new = replay(plan.order, resized)
    assert_disjoint(resized, new.offsets)
    check_placement(resized, new.offsets, new.total)
    assert new.total >= new.lower_bound == lower_bound(resized)


@given(block_lists(), st.integers(1, 40))
def test_replay_scales_with_the_batch(blocks: list[Block], batch: int) -> None:
    plan = place(blocks, search_looks=2_000)
    scaled = [replace(b, size=b.room * batch) for b in blocks]
    assert replay(plan.order, scaled).total == plan.total * batch


@given(block_lists(), st.data())
def test_fixed_blocks_stay_and_the_others_go_around(blocks: list[Block], data: st.DataObject) -> None:
    # Fix a part of a valid placement, somewhere higher than it has to be.
    plan = place(blocks, search_looks=0)
    fixed = [replace(b, offset=plan.offsets[b.key] + 640) if data.draw(st.booleans()) else b for b in blocks]
    new = place(fixed, search_looks=2_000)
    assert_disjoint(fixed, new.offsets)
    assert all(b.offset in (None, new.offsets[b.key]) for b in fixed)
    ends = [b.offset + b.room for b in fixed if b.offset is not None]
    assert new.total >= new.lower_bound == max([bytes_alive(blocks), *ends])
    assert replay(new.order, fixed).offsets == new.offsets
    assert set(new.order) == {b.key for b in fixed if b.offset is None}


def test_an_empty_and_a_zero_sized_plan() -> None:
    assert place([]).total == 0 and place([]).ratio == 1.0
    plan = place([Block(1, 0, 0, 5), Block(2, 64, 0, 5), Block(3, 0, 2, 2)])
    assert plan.total == 64 and plan.offsets == {1: 0, 2: 0, 3: 0}


def test_size_order_alone_is_not_enough_for_this_one() -> None:
    # Backward of an MLP: activations die in the reverse order of their birth.
    widths = [784, 512, 1000, 256, 768, 512, 256, 1000]
    count = len(widths)
    blocks = [Block(i, 256 * w, i, 2 * count - i) for i, w in enumerate(widths)]
    blocks += [Block(100 + i, 256 * w, 2 * count - i - 1, 2 * count - i) for i, w in enumerate(widths)]
    assert place(blocks).ratio <= 1.03


def test_the_search_improves_on_every_heuristic() -> None:
    # Random intervals with some twenty alive at once and all sizes equally likely: harder than any model.
    state, blocks = 12345, []
    for key in range(100):
        state, numbers = _lehmer(state, 3)
        first = numbers[0] % 100
        blocks.append(Block(key, 64 * (1 + numbers[1] % 200), first, first + numbers[2] % 40))
    without, searched = place(blocks, search_looks=0), place(blocks)
    assert without.total > searched.total
    assert searched.heuristic == "search"
    assert searched.ratio <= 1.05
    check_placement(blocks, searched.offsets, searched.total)


def _lehmer(state: int, count: int) -> tuple[int, list[int]]:
    numbers = []
    for _ in range(count):
        state = state * 48271 % (2**31 - 1)
        numbers.append(state >> 8)
    return state, numbers


def test_the_same_plan_in_every_process() -> None:
    script = (
        "from rlx.plan.memory.place import Block, place\n"
        "blocks = [Block(k, 64 * (k * 37 % 41), k * 53 % 97, k * 53 % 97 + k % 29) for k in range(80)]\n"
        "print(place(blocks, search_looks=20_000))"
    )
    assert len(outputs_by_hash_seed(script)) == 1


A, B = Block(3, 100, 0, 4), Block(8, 64, 4, 6)


@pytest.mark.parametrize(
    ("offsets", "total", "message"),
    [
        (
            {3: 0, 8: 64},
            None,
            r"blocks 3 and 8 overlap: bytes 0\.\.100 and 64\.\.128 are both alive at step 4",
        ),
        ({3: 0}, None, "block 8 has no offset"),
        ({3: 0, 8: 130}, None, "block 8 at 130 is not aligned to 64"),
        ({3: 0, 8: -64}, None, "block 8 at -64 is not aligned to 64"),
        ({3: 0, 8: 128}, 191, "block 8 ends at byte 192, but there are 191"),
    ],
)
def test_check_names_what_is_wrong(offsets: dict[int, int], total: int | None, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_placement([A, B], offsets, total)


def test_blocks_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="two blocks have the key 3"):
        place([A, A])
    with pytest.raises(PlanError, match=r"block 1 has size -1, steps 0\.\.1 and alignment 64"):
        place([Block(1, -1, 0, 1)])
    with pytest.raises(PlanError, match=r"block 1 has size 1, steps 2\.\.1"):
        lower_bound([Block(1, 1, 2, 1)])
    with pytest.raises(PlanError, match="blocks 3 and 8 overlap"):
        place([replace(A, offset=0), replace(B, offset=64)])
    with pytest.raises(PlanError, match="block 3 is fixed at 0 but placed at 64"):
        check_placement([replace(A, offset=0)], {3: 64})
    for order in [(3,), (3, 3), (3, 9), (3, 8, 9)]:
        with pytest.raises(PlanError, match="not the 2 blocks to place"):
            replay(order, [A, B])
