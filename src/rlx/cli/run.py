"""rlx run: a model on inputs from files or generated ones; outputs, times, and a trace of its kernels."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from rlx.cli.inputs import check_symbols, make_inputs, named, sizes_of, workable_sizes
from rlx.cli.model import MODEL_HELP, compile_options, open_model
from rlx.cli.output import (
    counted,
    human_bytes,
    human_time,
    json_option,
    print_json,
    print_line,
    print_table,
    progress,
)
from rlx.errors import FormatError
from rlx.runtime.trace import chrome_trace

if TYPE_CHECKING:
    from rlx.runtime.program import CompiledProgram

TRACED_RUNS = 3


@click.command(epilog=MODEL_HELP)
@click.argument("model")
@click.option(
    "--input",
    "-i",
    "given",
    multiple=True,
    metavar="NAME=WHAT",
    help="A .npy, .png or .wav file, or random, zeros, ones [random].",
)
@click.option(
    "--bind", "-b", multiple=True, metavar="NAME=SIZE", help="Size of a symbolic dim, like seq=128."
)
@compile_options
@click.option(
    "--repeat", "-n", default=1, show_default=True, type=click.IntRange(min=1), help="Number of timed runs."
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(min=0), help="Seed of random inputs."
)
@click.option("--profile", type=click.Path(dir_okay=False), help="Write a trace to this file, for Perfetto.")
@click.option(
    "--out", type=click.Path(file_okay=False), help="Write the outputs to this folder as .npy files."
)
@click.option(
    "--trust-native", is_flag=True, help="Run the native code of a .rlx file even if somebody else signed it."
)
@json_option
def run(
    model: str,
    given: tuple[str, ...],
    bind: tuple[str, ...],
    repeat: int,
    seed: int,
    profile: str | None,
    out: str | None,
    trust_native: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run MODEL; show its outputs and how long it takes.

    Inputs that are not given are random. For an integer input, random means zeros and ones.
    """
    wanted_inputs, sizes = named(given), sizes_of(bind)
    start = time.perf_counter()
    program = open_model(model, **options, trust_native=trust_native)
    loaded = time.perf_counter() - start
    check_symbols(sizes, program.lir.dynamic_symbols())
    types = {n.attrs["name"]: n.tensor for n in program.inputs}
    inputs = make_inputs(types, wanted_inputs, sizes, lambda fixed: workable_sizes(program, fixed), seed)
    with progress("running"):
        outputs, times = _timed(program, inputs, repeat)
        if profile is not None:
            _write_trace(program, inputs, Path(profile))
    if out is not None:
        _write_outputs(outputs, Path(out))
    facts = {
        "model": model,
        "load_seconds": loaded,
        "first_seconds": times[0],
        "seconds": times[1:],
        "inputs": {name: _described(a) for name, a in inputs.items()},
        "outputs": {name: {**_described(a), **_summary(a)} for name, a in outputs.items()},
        "stats": program.stats,
        "notes": program.notes,
    }
    if as_json:
        print_json(facts)
    else:
        _show(facts, profile, out)


def _timed(
    program: CompiledProgram, inputs: Mapping[str, np.ndarray], repeat: int
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Outputs, and seconds of the first run (which plans memory) and of `repeat` more with the best code."""
    times = []
    for number in range(1 + repeat):
        if number:
            program.wait_for_code()
        start = time.perf_counter()
        outputs = program.run(inputs)
        times.append(time.perf_counter() - start)
    return outputs, times


def _write_trace(program: CompiledProgram, inputs: Mapping[str, np.ndarray], path: Path) -> None:
    document = chrome_trace(program, program.trace(inputs, TRACED_RUNS))
    try:
        path.write_text(json.dumps(document), encoding="utf-8")
    except OSError as e:
        raise FormatError(f"cannot write the trace to {path}: {e.strerror or e}") from e


def _write_outputs(outputs: Mapping[str, np.ndarray], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in outputs.items():
            # Names of outputs may hold anything; a slash must not become a folder.
            plain = array.astype(np.float32) if array.dtype.kind == "V" else array  # bf16 and the like
            np.save(folder / f"{name.replace('/', '_')}.npy", plain)
    except OSError as e:
        raise FormatError(f"cannot write outputs to {folder}: {e.strerror or e}") from e


def _described(array: np.ndarray) -> dict[str, object]:
    return {"dtype": array.dtype.name, "shape": list(array.shape)}


def _summary(array: np.ndarray) -> dict[str, object]:
    """Least, greatest and mean value; None where there is none."""
    if array.size == 0 or array.dtype.kind == "c":
        return {"min": None, "max": None, "mean": None}
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    found = (finite.min(), finite.max(), finite.mean()) if finite.size else (None, None, None)
    return {k: None if v is None else float(v) for k, v in zip(("min", "max", "mean"), found, strict=True)}


def _show(facts: Mapping[str, Any], profile: str | None, out: str | None) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.6g}"

    def typed(about: Mapping[str, Any]) -> str:
        return f"{about['dtype']}[{','.join(map(str, about['shape']))}]"

    rows = [("input", name, typed(a), "", "", "") for name, a in facts["inputs"].items()]
    rows += [
        ("output", name, typed(a), number(a["min"]), number(a["mean"]), number(a["max"]))
        for name, a in facts["outputs"].items()
    ]
    print_table(
        ("", "name", "type", "min", "mean", "max"), rows, right=("min", "mean", "max"), optional=("mean", "")
    )
    times, stats = sorted(facts["seconds"]), facts["stats"]
    where = stats.get("device") or counted(stats["threads"], "thread")
    started = f"loaded in {human_time(facts['load_seconds'])}, first run {human_time(facts['first_seconds'])}"
    median, best = human_time(times[len(times) // 2]), human_time(times[0])
    print_line(f"\n{started}, then {median} (median of {len(times)}, best {best}) on {where}")
    streaming = stats["streaming"]
    if streaming is not None:
        print_line(
            f"weights: {human_bytes(streaming['resident_bytes'])} in memory, "
            f"{human_bytes(streaming['bytes_per_run'])} read in every run through a ring buffer of "
            f"{human_bytes(streaming['ring_bytes'])}, {streaming['overlap']:.0%} of that time hidden"
        )
    thunks = stats["host_thunks"]
    if thunks:
        print_line(
            f"{counted(len(thunks), 'host thunk')} besides {counted(stats['kernels'], 'kernel')}; "
            "rlx explain shows why"
        )
    for note in facts["notes"]:
        print_line(f"note: {note}")
    if profile is not None:
        print_line(f"trace of {TRACED_RUNS} runs in {profile}; open it in Perfetto or chrome://tracing")
    if out is not None:
        print_line(f"outputs in {out}")
