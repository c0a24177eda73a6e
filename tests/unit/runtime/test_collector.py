"""Compiling leaves nothing for the garbage collector to do at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import rlx
from rlx import collector
from rlx.api.compile import plan
from rlx.collector import collector_paused


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    running = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if running else gc.disable)()


def test_nothing_is_collected_inside_and_what_was_made_is_old_afterwards() -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with collector_paused():
            made = [[i] for i in range(10 * gc.get_threshold()[0])]
            assert not seen
            counted = gc.get_count()[0]
    finally:
        gc.callbacks.remove(note)
    assert counted > gc.get_threshold()[0] > gc.get_count()[0]
    young = {id(o) for generation in (0, 1) for o in gc.get_objects(generation)}
    assert not young & {id(o) for o in made}


def test_garbage_of_inside_is_found_later() -> None:
    class Thing:
        pass

    with collector_paused():
        thing = Thing()
        thing.me = thing  # type: ignore[attr-defined]
        alive = weakref.ref(thing)
        del thing
    assert alive() is not None
    gc.collect()
    assert alive() is None


def test_garbage_of_many_pauses_goes_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "_LEAST", 1000)
    monkeypatch.setattr(collector, "_unseen", 0)
    monkeypatch.setattr(collector, "_alive", 0)

    class Thing:
        pass

    dropped: list[weakref.ref[Thing]] = []
    for _ in range(20):
        with collector_paused():
            things = [Thing() for _ in range(400)]
            for thing in things:
                thing.me = thing  # type: ignore[attr-defined]
            dropped.append(weakref.ref(things[0]))
            del things, thing
        monkeypatch.setattr(collector, "_alive", 0)  # the test process itself holds very many
    assert sum(thing() is not None for thing in dropped) < 8


def test_weights_of_dropped_graphs_go_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of three nodes is little to look for, but holds its weights."""
    monkeypatch.setattr(collector, "_unseen", 0)
    dropped: list[weakref.ref[np.ndarray]] = []
    for _ in range(6):
        monkeypatch.setattr(collector, "_alive", 0)
        weight = np.zeros((40_000, 1024), np.float32)  # memory that nobody touches is not there
        g = rlx.Graph("large")
        g.output("y", rlx.ops.sum(g.param("w", weight.shape, "f32", weight)))
        plan(g)
        dropped.append(weakref.ref(weight))
        del g, weight
    assert sum(weight() is not None for weight in dropped) < 4


def test_objects_that_somebody_froze_stay_frozen_and_a_disabled_collector_stays_disabled() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        # Threads of earlier tests may still drop some, which then count no more.
        assert frozen >= gc.get_freeze_count() > frozen // 2 > 0
    finally:
        gc.unfreeze()
    gc.disable()
    with collector_paused(), collector_paused():
        pass
    assert not gc.isenabled()
