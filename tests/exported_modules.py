"""Programs exported to WebAssembly in tests: run by wasmtime, through the functions that the loader calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import wasmtime

from exported_programs import ExportError
from rlx.export.export import prepare
from rlx.export.wasm import module_of
from rlx.export.weights import weight_parts
from rlx.runtime.program import CompiledProgram

_PAGE = 65536


class WebModel:
    """A program in a WebAssembly engine: arrays in, arrays out, error codes as exceptions."""

    def __init__(
        self,
        program: CompiledProgram,
        bind: Mapping[str, tuple[int, int]] | None = None,
        target: str = "wasm32",
    ) -> None:
        prepared = prepare(program, bind or {}, target=target)
        self.program, self.tables = program, prepared.tables
        self.module = module_of(prepared).data
        engine = wasmtime.Engine()
        self._store = wasmtime.Store(engine)
        self._exports = wasmtime.Instance(self._store, wasmtime.Module(engine, self.module), []).exports(
            self._store
        )
        self._memory = self._exports["memory"]
        weights = b"".join(weight_parts(prepared.tables, prepared.version))
        start = self._exports["heap"].value(self._store)
        self._sizes = -(-(start + len(weights)) // 4096) * 4096
        self._context = self._sizes + 4096
        end = self._context + self.call("bytes", 1)
        self._memory.grow(self._store, max(0, -(-(end - self._memory.data_len(self._store)) // _PAGE)))
        self.write(start, weights)
        self.check(self.call("init", self._context, start, len(weights)))

    def call(self, name: str, *arguments: int) -> int:
        return int(self._exports[name](self._store, *arguments) or 0)

    def read(self, at: int, nbytes: int) -> bytes:
        return bytes(self._memory.read(self._store, at, at + nbytes))

    def write(self, at: int, data: bytes) -> None:
        self._memory.write(self._store, data, at)

    def check(self, code: int) -> None:
        if code:
            start = self.call("error", code)
            text = self.read(start, min(1000, self._memory.data_len(self._store) - start))
            raise ExportError(code, text.partition(b"\0")[0].decode())

    def bind(self, sizes: Sequence[int]) -> None:
        self.write(self._sizes, np.array(sizes, np.int64).tobytes())
        self.check(self.call("bind", self._context, self._sizes))

    def _place(self, kind: str, number: int, rank: int) -> tuple[int, tuple[int, ...]]:
        shape_at = self.call(f"{kind}_shape", self._context, number)
        shape = tuple(np.frombuffer(self.read(shape_at, 8 * rank), np.int64).tolist())
        return self.call(kind, self._context, number), shape

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        for number, node in enumerate(self.program.inputs):
            at, shape = self._place("input", number, node.tensor.rank)
            given = np.asarray(inputs[node.attrs["name"]], order="C")
            assert shape == given.shape, (shape, given.shape)
            self.write(at, given.tobytes())
        self.check(self.call("run", self._context))
        out = {}
        for number, (name, node) in enumerate(
            zip(self.program.output_names, self.program.outputs, strict=True)
        ):
            at, shape = self._place("output", number, node.tensor.rank)
            count = int(np.prod(shape, dtype=np.int64)) * node.dtype.itemsize
            out[name] = np.frombuffer(self.read(at, count), np.uint8).view(node.dtype.np).reshape(shape)
        return out

    def reset(self) -> None:
        self.call("reset", self._context)
