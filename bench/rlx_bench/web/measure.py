"""Exports and peers on one workload, in turns: times of a run, times to the first result, differences."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config import HOST
from rlx.records import dataclass
from rlx_bench.harness import Asked, EngineError, Expected, Measured, Row, Worker, compare, take_times
from rlx_bench.web.exports import write_exports
from rlx_bench.web.places import Chromium, Node, Tab
from rlx_bench.workloads import make

NATIVE = "x86-64"
NODE, BROWSER = "node", "chromium"
PEER = "onnxruntime-web"
WARM_SECONDS = 1.0  # engines compile for real what runs often, in the background


@dataclass
class Places:
    """Where engines run, and where files are."""

    folder: Path
    packages: Path | None
    node: str | None
    chromium: Chromium | None


@dataclass
class WebRow:
    """A workload: times of a run and of the first result, and bytes of the modules of RLX."""

    row: Row
    first: dict[str, list[float]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def times_faster(self, engine: str, than: str) -> float | None:
        own, other = self.row.of(engine), self.row.of(than)
        return other.median / own.median if own and other else None

    def first_result(self, engine: str) -> float | None:
        """The median time to the first result."""
        times = self.first.get(engine)
        return statistics.median(times) if times else None


class _Saving:
    """A place whose outputs are saved by Python, as the harness asks for it."""

    def __init__(self, place: Asked) -> None:
        self._place = place

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        if do != "save":
            return self._place.ask(do, **command)
        np.savez(command["path"], *map(_array, self._place.ask("outputs")["outputs"]))
        return {"saved": True}


_TYPES = {"f32": "float32", "f64": "float64", "i64": "int64", "i32": "int32", "u8": "uint8", "i8": "int8"}


def _array(output: dict[str, Any]) -> np.ndarray:
    dtype = _TYPES.get(output["type"], output["type"])
    return np.frombuffer(base64.b64decode(output["data"]), dtype).reshape(output["shape"])


def measure(
    spec: str,
    threads: int,
    places: Places,
    rounds: int,
    starts: int,
    expected: Expected,
    say: Callable[[str], None],
) -> WebRow:
    """One workload on all engines."""
    workload = make(spec)
    say(f"{workload.name}: exporting")
    folders = write_exports(spec, places.folder)
    measured: dict[str, Measured] = {}
    ready: dict[str, Asked] = {}
    first: dict[str, list[float]] = {}
    with ExitStack() as stack:

        def join(engine: str, begin: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
            say(f"{workload.name}: preparing {engine}")
            into = measured[engine] = Measured(engine)
            try:
                place, answer = begin()
                stack.callback(place.close)
                into.ready = answer["ready"]
                ready[engine] = place if isinstance(place, Worker) else _Saving(place)
            except EngineError as error:
                into.error = str(error)

        def native() -> tuple[Any, dict[str, Any]]:
            worker = Worker("rlx-f32", threads, variables={HOST.name: NATIVE})
            return worker, worker.ask("make", spec=spec)

        def on_node(folder: Path) -> tuple[Any, dict[str, Any]]:
            assert places.node is not None
            node = Node(places.node)
            return node, node.ask("make", engine="rlx", folder=f"{folder.resolve()}/", threads=threads)

        def in_browser(name: str, engine: str, folder: Path) -> tuple[Any, dict[str, Any]]:
            assert places.chromium is not None
            tab = Tab(places.chromium, name)
            at = f"/made/{folder.relative_to(places.folder)}/"
            return tab, tab.ask("make", engine=engine, folder=at, packages="/packages/", threads=threads)

        join(NATIVE, native)
        browser: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {}
        for target, folder in folders.items():
            if target == "ort":
                continue
            if places.node is not None:
                join(f"{NODE} {target}", lambda folder=folder: on_node(folder))  # type: ignore[misc]
            browser[f"{BROWSER} {target}"] = lambda target=target, folder=folder: in_browser(  # type: ignore[misc]
                target, "rlx", folder
            )
        if places.packages is not None:
            browser[PEER] = lambda: in_browser("ort", "ort", folders["ort"])
        if places.chromium is not None:
            first = _first_results(browser, starts, say, workload.name)
            for engine, begin in browser.items():
                join(engine, begin)
        for engine, place in ready.items():
            say(f"{workload.name}: warming {engine}")
            once = min(place.ask("time", samples=2, inner=1)["times"])
            place.ask("warm", runs=max(round(WARM_SECONDS / max(once, 1e-5)), 2))
        take_times(workload.name, ready, measured, rounds, threads, say)
        compare(ready, measured, expected, spec, workload.tolerance)
    sizes = {t: (folder / "net.wasm").stat().st_size for t, folder in folders.items() if t != "ort"}
    return WebRow(Row(workload.name, threads, 0.0, 0.0, list(measured.values())), first, sizes)


def _first_results(
    browser: dict[str, Callable[[], tuple[Any, dict[str, Any]]]],
    starts: int,
    say: Callable[[str], None],
    name: str,
) -> dict[str, list[float]]:
    """Seconds from nothing loaded to the first result, each time in a new worker; engines take turns."""
    found: dict[str, list[float]] = {engine: [] for engine in browser}
    for _ in range(starts):
        for engine, begin in browser.items():
            say(f"{name}: first result of {engine}")
            try:
                place, answer = begin()
            except EngineError:  # the measurement says so, too
                continue
            place.close()
            found[engine].append(answer["ready"])
    return found


HEAD = ("model", "threads", "engine", "ms", "±", "of x86-64", "of ort", "first", "module", "error")


def cells(found: WebRow) -> list[list[str]]:
    """Lines of the table: one of each engine."""
    out = []
    for m in found.row.engines:
        than = {peer: found.times_faster(m.engine, peer) for peer in (NATIVE, PEER)}
        first = found.first_result(m.engine)
        size = found.bytes.get(m.engine.rpartition(" ")[2])
        out.append(
            [
                found.row.workload,
                str(found.row.threads),
                m.engine,
                f"{m.median * 1e3:.3f}" if m.times else "-",
                f"{m.spread:.0%}" if m.times else "-",
                *("-" if x is None else f"{x:.2f}x" for x in than.values()),
                "-" if first is None else f"{first * 1e3:.0f} ms",
                "-" if size is None else f"{size / 1024:.0f} KiB",
                m.error or f"{m.difference:.0e}",
            ]
        )
    return out
