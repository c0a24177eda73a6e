"""The texts of an export to WebAssembly: an ES module and its TypeScript types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from rlx.config import VERSION, bytes_text
from rlx.export.prepared import Prepared
from rlx.export.tables import Argument
from rlx.export.wasm_link import STACK
from rlx.ir.dim import Dim, Sym

_ARRAYS = {
    "f64": "Float64Array",
    "f32": "Float32Array",
    "i64": "BigInt64Array",
    "u64": "BigUint64Array",
    "i32": "Int32Array",
    "u32": "Uint32Array",
    "i16": "Int16Array",
    "u16": "Uint16Array",
    "i8": "Int8Array",
    "u8": "Uint8Array",
    "bool": "Uint8Array",
    "f16": "Uint16Array",
    "bf16": "Uint16Array",
    "c64": "Float32Array",
    "c128": "Float64Array",
}


def array_type(entry: Argument) -> str:
    """The typed array that holds an input or output in JavaScript."""
    return _ARRAYS.get(entry.dtype.name, "Uint8Array")


def _size(d: Dim) -> int | str:
    """A size as JavaScript sees it: a number, the name of a symbol, or an expression of symbols."""
    if isinstance(d, int):
        return d
    return d.atom.name if isinstance(d.atom, Sym) else str(d)


def _entries(entries: Sequence[Argument]) -> list[dict[str, object]]:
    return [
        {
            "name": e.name,
            "type": e.dtype.name,
            "array": array_type(e),
            "parts": 2 if e.dtype.is_complex else 1,  # elements of the array for one of the value
            "rank": len(e.shape),
            "shape": [_size(d) for d in e.shape],
        }
        for e in entries
    ]


def script(program: Prepared, weight_bytes: int, pages: tuple[int, int]) -> str:
    """The ES module: what is known of the program, then the loader, which is the same for all. `pages` are
    the least and the most that memory which threads share has."""
    tables = program.tables
    info = {
        "name": program.name,
        "version": f"{program.version:#018x}",
        "weights": weight_bytes,
        "stack": STACK,
        "pages": pages,
        "symbols": [{"name": s.name, "low": s.low, "high": s.high} for s in tables.symbols],
        "inputs": _entries(tables.inputs),
        "outputs": _entries(tables.outputs),
        "states": len(tables.states),
        "seven": any("relaxed.dot" in text for text in program.kernels),  # products that it checks first
    }
    loader = files("rlx.export").joinpath("loader.mjs").read_text(encoding="utf-8")
    first = f"// {program.name}, compiled for {tables.target} by RLX {VERSION}."
    return f"{first}\nconst INFO = {json.dumps(info, indent=2)};\n\n{loader}"


def declarations(program: Prepared) -> str:
    """The TypeScript types of the ES module."""
    tables = program.tables

    def shape(entry: Argument) -> str:
        return ("[" + ", ".join(map(str, entry.shape)) + "]").replace("*/", "* /")

    def fields(entries: Sequence[Argument]) -> str:
        listed = (
            f"  /** {e.dtype.name}{shape(e)} */\n  {json.dumps(e.name)}: {array_type(e)};" for e in entries
        )
        return "\n".join(listed)

    sizes = "\n".join(
        f"  /** from {s.low} to {s.high} */\n  {json.dumps(s.name)}: number;" for s in tables.symbols
    )
    return f"""// {program.name}, compiled for {tables.target} by RLX {VERSION}.

export interface Inputs {{
{fields(tables.inputs)}
}}

export interface Outputs {{
{fields(tables.outputs)}
}}

export interface Sizes {{
{sizes}
}}

export interface Options {{
  /** Where to run. Only WebAssembly, so far. */
  device?: "wasm" | "auto";
  /** How many threads to use, by default 4 or as many as there are cores. It is 1 where memory cannot be
   *  shared: in pages that are not cross-origin isolated. The model says how many are used. */
  threads?: number;
  /** Called as weights arrive, {bytes_text(tables.spaces["weight"])} in all. */
  onProgress?: (loaded: number, total: number) => void;
  /** Keep the weights in the browser's cache; true by default, where there is one. */
  cache?: boolean;
}}

/** An error of the model, with the code that it has in C. */
export class ModelError extends Error {{
  code: number;
}}

export class Model {{
  /** How many threads run it. */
  readonly threads: number;
  /** Set the sizes of the next runs. */
  bind(sizes: Sizes): void;
  /** Compute outputs; with `sizes`, they are bound first. With `copy: false`, outputs are arrays over the
   *  memory of the model: the next run overwrites them. */
  run(inputs: Inputs, sizes?: Sizes, options?: {{ copy?: boolean }}): Outputs;
  /** An array over the memory of the model, at the sizes that are bound: `run` takes it without copying. */
  input<Name extends keyof Inputs>(name: Name): Inputs[Name];
  /** The shape of an input or output at the sizes that are bound. */
  shape(name: keyof Inputs | keyof Outputs): number[];
  /** States begin anew. */
  reset(): void;
  /** End all threads; the model cannot be used afterwards. */
  close(): void;
}}

/** The version of the model; its weights must have the same. */
export const version: string;

export interface Entry {{
  name: string;
  /** The type of its elements, such as f32. */
  type: string;
  /** The typed array that holds it, which has `parts` elements for one of the value. */
  array: string;
  parts: number;
  /** Its sizes: numbers, or expressions of symbols. */
  shape: (number | string)[];
}}

/** What the model takes and gives. */
export const info: {{
  name: string;
  version: string;
  symbols: {{ name: string; low: number; high: number }}[];
  inputs: Entry[];
  outputs: Entry[];
  /** How many states it keeps from run to run. */
  states: number;
}};

/** Load the model; `url` is the folder with its files, by default that of this module. */
export function load(url?: string | URL, options?: Options): Promise<Model>;
"""
