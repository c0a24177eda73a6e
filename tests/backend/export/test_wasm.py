"""Programs exported to WebAssembly: values in wasmtime, the loader in Node, errors, the linker."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, by_op, cases, features

import rlx
from rlx import ops
from rlx.codegen.native.jit import assembly, compile_linked
from rlx.errors import CompileError, ConfigError, FormatError, UnsupportedError
from rlx.export.errors import Code
from rlx.export.export import prepare
from rlx.export.wasm_link import link, signed, unsigned
from rlx.ir.graph import Graph
from rlx.reference.interpreter import evaluate
from rlx.target.cpu import resolve, web_targets

SAMPLE = (
    "add attention conv conv_integer cos erf gather layer_norm loop matmul matmul_integer max_pool remainder "
    "scan scatter sort topk where"
).split()


@pytest.fixture
def web(require):  # type: ignore[no-untyped-def]
    require("wasmtime")
    from exported_modules import WebModel

    return WebModel


def hardest(samples: list[Case]) -> Case:
    return max(samples, key=lambda case: (case.symbolic, len(features(case))))


def check_case(case: Case, web: Callable[..., object], target: str) -> bool:
    graph, sizes, feed = case.graph()[0], case.binding(), case.feed()
    try:
        model = web(rlx.compile(graph, threads=1), {name: (0, n + 3) for name, n in sizes.items()}, target)
    except UnsupportedError:
        return False
    if sizes:
        model.bind([sizes[s.name] for s in model.tables.symbols])  # type: ignore[attr-defined]
    got = model.run(feed)  # type: ignore[attr-defined]
    for name, value in evaluate(graph, feed).items():
        assert_close(got[name], value)
    return True


@pytest.mark.parametrize("op", [op for op in ALL_OPS if op.name in SAMPLE], ids=lambda op: op.name)
def test_a_sample_of_ops(op, web) -> None:  # type: ignore[no-untyped-def]
    target = web_targets()[len(op.name) % 2].name
    assert any(check_case(case, web, target) for case in (hardest(cases(op)), cases(op)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("target", [t.name for t in web_targets()])
def test_most_ops_can_be_exported(web, target: str) -> None:  # type: ignore[no-untyped-def]
    assert sum(check_case(hardest(cases(op)), web, target) for op in ALL_OPS) > 200


@pytest.mark.slow
@pytest.mark.usefixtures("web")
@by_op(ALL_CASES)
def test_all_cases(case: Case) -> None:
    from exported_modules import WebModel

    for target in web_targets():
        check_case(case, WebModel, target.name)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def recurrent() -> Graph:
    """A recurrent state, a scan over time, and a branch that data choose."""
    g = Graph("recurrent")
    x, w = g.input("x", ("time", 8), "f32"), g.param("w", (8, 8), "f32", value=values(8, 8))
    h = g.state("h", (8,), "f32", init=values(8, seed=1))
    last, every = ops.scan(lambda a, b: (ops.tanh(a @ w + b),) * 2, h, x)
    g.set_state("h", last)
    g.output("every", ops.cond(ops.sum(last) < 0.0, lambda: every * 2.0, lambda: every - 1.0))
    return g


def test_states_and_control_flow(web) -> None:  # type: ignore[no-untyped-def]
    program = rlx.compile(recurrent(), threads=1)
    model = web(program, {"time": (0, 9)})
    for _ in range(2):
        stream = program.stream()
        for step, time in enumerate((3, 0, 9, 4)):
            model.bind([time])
            feed = {"x": values(time, 8, seed=step)}
            assert_close(model.run(feed)["every"], stream.step(feed)["every"])
        model.reset()


def test_errors_have_codes_and_texts(web) -> None:  # type: ignore[no-untyped-def]
    from exported_programs import ExportError

    g = Graph("pick")
    rows = g.input("x", ("n", 2), "f32")
    g.output("y", ops.gather(rows, g.input("i", (3,), "i64"), axis=0))
    model = web(rlx.compile(g, threads=1), {"n": (1, 4)})
    for sizes, told in (([5], "size 'n' must be from 1 to 4"), ([0], "from 1 to 4")):
        with pytest.raises(ExportError, match=told):
            model.bind(sizes)
    model.bind([4])
    with pytest.raises(ExportError, match="out of range") as failed:
        model.run({"x": values(4, 2), "i": np.array([0, 1, 4])})
    assert failed.value.code == Code.INDEX
    assert model.run({"x": values(4, 2), "i": np.array([0, 1, 3])})["y"].shape == (3, 2)


# -- the loader

CHECK = """
import { load, ModelError, version } from "./net.mjs";
import fs from "node:fs";
const seen = [];
const onProgress = (loaded, total) => seen.push([loaded, total]);
const model = await load(undefined, { threads: 1, onProgress });
const raw = fs.readFileSync(new URL("./x.bin", import.meta.url));
const x = new Float32Array(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
const found = { threads: model.threads, progress: seen.at(-1), version, errors: [] };
found.first = Array.from(model.run({ x }, { time: 5 }).every);
found.shape = model.shape("every");
model.reset();
found.again = Array.from(model.run({ x }).every);
const wrong = [
  () => model.bind({ time: 10 }),
  () => model.bind({ time: 1.5 }),
  () => model.bind({ time: 5, seq: 1 }),
  () => model.run({ x: x.slice(1) }),
  () => model.run({ x: Array.from(x) }),
  () => model.run({ x, z: x }),
  () => model.shape("nothing"),
];
wrong.push(() => load(undefined, { device: "webgpu" }), () => load(undefined, { threads: 0 }));
const several = await load(undefined, { threads: 3 });
found.several = several.threads;
found.together = Array.from(several.run({ x }, { time: 5 }).every);
found.equal = true;
for (let i = 0; i < 20; i++) {
  several.reset();
  const now = several.run({ x }).every;
  found.equal &&= found.together.every((value, at) => value === now[at]);
}
several.close();
model.reset();
const own = model.input("x");
own.set(x);
const before = model.run({ x: own }, undefined, { copy: false }).every, held = Array.from(before);
model.reset();
found.place = held.every((value, at) => value === found.first[at]) && own === model.input("x");
found.place &&= own.every((value, at) => value === x[at]);  // a run leaves its inputs as they are
own[0] += 1;
found.place &&= model.run({ x: own }, undefined, { copy: false }).every === before && before[0] !== held[0];
wrong.push(() => model.input("every"));
for (const each of wrong) {
  try { await each(); } catch (error) { found.errors.push(`${error.name}: ${error.message}`); }
}
for (const bytes of [4200, 0]) {
  const weights = new URL("./net.weights", import.meta.url), whole = fs.readFileSync(weights);
  fs.writeFileSync(weights, whole.subarray(0, bytes));
  try { await load(); } catch (error) { found.errors.push(`${error instanceof ModelError} ${error.code}`); }
  fs.writeFileSync(weights, whole);
}
console.log(JSON.stringify(found));
"""


def test_the_loader_runs_in_node(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Without eval, as under a content security policy: code from strings is forbidden."""
    require("node")
    program = rlx.compile(recurrent(), threads=1)
    made = program.export(tmp_path, "wasm", name="net", bind={"time": (1, 9)})
    assert set(made.files) == {"net.wasm", "net.threads.wasm", "net.weights", "net.mjs", "net.d.mts"}
    values(5, 8).tofile(tmp_path / "x.bin")
    (tmp_path / "check.mjs").write_text(CHECK)
    command = ["node", "--disallow-code-generation-from-strings", "check.mjs"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    want = program.run({"x": values(5, 8)})["every"]
    for name in ("first", "again", "together"):
        np.testing.assert_allclose(np.reshape(found[name], (5, 8)), want, rtol=2e-5, atol=2e-5)
    assert found["shape"] == [5, 8] and found["threads"] == 1
    assert found["place"]  # arrays over its memory
    assert found["several"] == 3 and found["equal"] and found["together"] == found["first"]
    assert found["progress"] == [made.files["net.weights"]] * 2
    assert found["errors"] == [
        "ModelError: size 'time' must be from 1 to 9",
        'TypeError: size "time" must be a whole number from 1 to 9',
        'TypeError: net has no size "seq"',
        'RangeError: input "x" has 39 elements, not 40, the product of [5,8]',
        'TypeError: input "x" must be a Float32Array',
        'TypeError: net has no input "z"',
        'TypeError: net has no input or output "nothing"',
        'TypeError: device "webgpu" is not known; use "wasm" or "auto"',
        "TypeError: threads must be a whole number of at least 1",
        'TypeError: net has no input "every"',
        f"true {int(Code.TRUNCATED)}",
        f"true {int(Code.TRUNCATED)}",
    ]


def test_types_name_what_the_model_takes(tmp_path: Path) -> None:
    rlx.compile(recurrent()).export(tmp_path, "wasm", name="net", bind={"time": (1, 9)})
    types = (tmp_path / "net.d.mts").read_text()
    assert '/** f32[time, 8] */\n  "x": Float32Array;' in types
    assert '/** from 1 to 9 */\n  "time": number;' in types


# -- code


@pytest.mark.parametrize("target", [t.name for t in web_targets()])
def test_tiles_take_their_rows_one_at_a_time(target: str) -> None:
    """All sums of a row come before the next row is read; engines keep that order, and would spill."""
    g = Graph("product")
    w = g.param("w", (64, 48), "f32", value=values(64, 48))
    g.output("y", g.input("x", (32, 64), "f32") @ w)
    rows, vectors = resolve(target).tile("f32")
    adds = "f32x4.relaxed_madd" if resolve(target).may_fuse else "f32x4.add"
    loops = [
        piece.partition("end_loop")[0]
        for kernel in prepare(rlx.compile(g, threads=1), {}, target=target).kernels
        for piece in assembly(kernel, resolve(target)).split("\tloop ")[1:]
    ]
    found = [loop.split("v128.load32_splat")[1:] for loop in loops]
    assert [vectors] * rows in [[row.count(adds) for row in each] for each in found]


def test_relaxed_code_keeps_what_is_not_a_number() -> None:
    """A relaxed minimum may lose a NaN or the sign of a zero; engines do, wasmtime does not."""
    for name in ("atan", "clip", "maximum", "minimum", "reduce_max", "reduce_min", "relu"):
        for case in cases(next(op for op in ALL_OPS if op.name == name)):
            ranges = {symbol: (0, size) for symbol, size in case.binding().items()}
            made = prepare(rlx.compile(case.graph()[0], threads=1), ranges, target="wasm32-relaxed")
            for kernel in made.kernels:
                found = re.findall(r"relaxed_(?!madd|nmadd)\w+", assembly(kernel, made.target))
                assert not found, case.id


# -- limits


def test_programs_over_two_gigabytes_are_refused(tmp_path: Path) -> None:
    g = Graph("large")
    g.output("y", ops.exp(g.input("x", ("n",), "f32")))
    with pytest.raises(UnsupportedError, match=r"needs 2\.24 GiB .* WebAssembly has 2 GiB"):
        rlx.compile(g).export(tmp_path, "wasm", bind={"n": (0, 300_000_000)})


def test_targets_fit_the_kind(tmp_path: Path) -> None:
    g = Graph("twice")
    g.output("y", g.input("x", (4,), "f32") * 2.0)
    program = rlx.compile(g)
    for kind, target in (("c", "wasm32"), ("wasm", "x86-64")):
        with pytest.raises(ConfigError, match=f"not for target {target}; choose "):
            program.export(tmp_path, kind, target=target)
    with pytest.raises(ConfigError, match="kind 'rust'"):
        program.export(tmp_path, "rust")
    with pytest.raises(CompileError, match="runs in a browser, not here; export it"):
        rlx.compile(g, target="wasm32")
    with pytest.raises(FormatError, match="no code for wasm32; export it"):
        program.save(tmp_path / "twice.rlx", targets=["wasm32"])


# -- the linker


@pytest.mark.parametrize("value", [0, 1, 63, 64, 127, 128, 300, 2**31, 2**32 - 1])
def test_numbers_have_room_for_relocation(value: int) -> None:
    """Padded numbers have the value of short ones."""
    for wide in (unsigned(value), unsigned(value, 5)):
        assert sum((byte & 0x7F) << 7 * i for i, byte in enumerate(wide)) == value
        assert all(byte >= 0x80 for byte in wide[:-1]) and wide[-1] < 0x80
    assert len(unsigned(value, 5)) == 5 and len(signed(value // 2, 5)) == 5


def test_the_linker_links_calls_data_and_tables(require) -> None:  # type: ignore[no-untyped-def]
    """Two modules: a call between them, a constant with a pointer to data, a table of functions."""
    require("wasmtime")
    import wasmtime

    first = """
@words = private constant [3 x i64] [i64 5, i64 7, i64 11]
@second = private constant ptr getelementptr (i64, ptr @words, i64 1)
define hidden i64 @word(i32 %i) {
  %p = getelementptr i64, ptr @words, i32 %i
  %w = load i64, ptr %p
  %q = load ptr, ptr @second
  %v = load i64, ptr %q
  %s = mul i64 %w, %v
  ret i64 %s
}
"""
    second = """
declare hidden i64 @word(i32)
define internal i64 @other(i32 %i) {
  %w = zext i32 %i to i64
  ret i64 %w
}
@both = private constant [2 x ptr] [ptr @word, ptr @other]
define i64 @choose(i32 %which, i32 %i) {
  %p = getelementptr ptr, ptr @both, i32 %which
  %f = load ptr, ptr %p
  %v = call i64 %f(i32 %i)
  ret i64 %v
}
"""
    made = link(compile_linked([first, second], resolve("wasm32")), {"choose": "pick"}, 100).data
    store = wasmtime.Store(wasmtime.Engine())
    module = wasmtime.Module(store.engine, made)
    assert not module.imports
    found = wasmtime.Instance(store, module, []).exports(store)
    assert [found["pick"](store, 0, i) for i in range(3)] == [35, 49, 77]
    assert found["pick"](store, 1, 9) == 9
    assert found["heap"].value(store) % 4096 == 0


def test_a_call_of_a_library_is_refused_by_name() -> None:
    text = """
declare float @sinf(float)
define float @f(float %x) {
  %y = call float @sinf(float %x)
  ret float %y
}
"""
    with pytest.raises(CompileError, match="calls sinf, which WebAssembly does not have"):
        link(compile_linked([text], resolve("wasm32")), {"f": "f"}, 100)
