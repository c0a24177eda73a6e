"""Exported programs in tests: the objects of an export to C, loaded and called through their C interface."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.codegen.native.jit import load_all
from rlx.export.c import objects_of
from rlx.export.export import prepare
from rlx.export.weights import weight_parts
from rlx.runtime.program import CompiledProgram

WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")


def built(folder: Path, compiler: str, output: str, *arguments: str) -> Path:
    """What a compiler of C, which must have nothing to say, makes in a folder."""
    command = [compiler, *WARNINGS, *arguments, "-pthread", "-o", str(folder / output)]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder / output


def feed_files(folder: Path, arrays: Iterable[np.ndarray]) -> list[str]:
    """Files with the bytes of inputs."""
    paths = []
    for number, array in enumerate(arrays):
        np.ascontiguousarray(array).tofile(folder / f"{number}.bin")
        paths.append(str(folder / f"{number}.bin"))
    return paths


class Example:
    """The program `main.c` of an export to C, at the largest sizes of its ranges."""

    def __init__(
        self, program: CompiledProgram, folder: Path, sizes: Mapping[str, int], target: str | None = None
    ) -> None:
        self.program, self.folder, self.sizes = program, folder, dict(sizes)
        ranges = {name: (min(size, 1), size) for name, size in sizes.items()}
        program.export(folder, "c", bind=ranges, name="net", target=target)

    def run(
        self,
        feed: Mapping[str, np.ndarray],
        compiler: str = "gcc",
        flags: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> dict[str, np.ndarray]:
        """The outputs, when it is built by a compiler and run by what comes `before` it: an emulator."""
        main = built(self.folder, compiler, f"main_{compiler}", *flags, "main.c", "libnet.a")
        files = feed_files(self.folder, (feed[node.attrs["name"]] for node in self.program.inputs))
        command = [*before, str(main), "net.weights", *files]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, check=False)
        assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
        out, at = {}, 0
        for name, node in zip(self.program.output_names, self.program.outputs, strict=True):
            shape = node.tensor.bind(self.sizes)
            count = int(np.prod(shape, dtype=np.int64)) * node.dtype.itemsize
            raw = np.frombuffer(done.stdout[at : at + count], np.uint8)
            out[name] = raw.view(node.dtype.np).reshape(shape)
            at += count
        assert at == len(done.stdout)
        return out


class ExportError(Exception):
    """An error code of an exported program, with its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Library:
    """An exported program as Python sees it: arrays in, arrays out, error codes as exceptions."""

    def __init__(
        self,
        program: CompiledProgram,
        folder: Path,
        bind: Mapping[str, tuple[int, int]] | None = None,
        name: str | None = None,
    ) -> None:
        prepared = prepare(program, bind or {}, name)
        self.weights = folder / f"{prepared.name}.weights"
        self.weights.write_bytes(b"".join(weight_parts(prepared.tables, prepared.version)))
        self._code = load_all(objects_of(prepared), prepared.target)
        self.program, self.name, self.tables = program, prepared.name, prepared.tables

    def function(self, name: str, returns: Any = ctypes.c_int, *takes: Any) -> Callable[..., Any]:
        address = self._code.address(f"{self.name}_{name}")
        return ctypes.CFUNCTYPE(returns, *takes)(address)

    def check(self, code: int) -> None:
        if code:
            text = self.function("error", ctypes.c_char_p, ctypes.c_int)(code)
            raise ExportError(code, text.decode())

    def open(self, weights: Path | None = None, threads: int = 1) -> Model:
        """A model with the weights of a file, by default those of the export."""
        path, place = str(weights or self.weights), ctypes.c_void_p()
        opened = self.function("open", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
        self.check(opened(ctypes.byref(place), path.encode(), threads))
        assert place.value is not None
        return Model(self, place.value)


class Model:
    """An open model."""

    def __init__(self, library: Library, place: int) -> None:
        self._library, self._place = library, place
        pointer = ctypes.c_void_p
        self._bind = library.function("bind", ctypes.c_int, pointer, pointer)
        self._run = library.function("run", ctypes.c_int, pointer)
        self._find = {
            name: library.function(name, pointer, pointer, ctypes.c_int)
            for name in ("input", "output", "input_shape", "output_shape")
        }

    def bind(self, sizes: Sequence[int]) -> None:
        words = np.array([*sizes, 0], np.int64)
        self._library.check(self._bind(self._place, words.ctypes.data))

    def array(self, kind: str, number: int, rank: int, dtype: np.dtype) -> np.ndarray:
        """The memory of an input or output at the sizes that are bound."""
        shape_at = self._find[f"{kind}_shape"](self._place, number)
        shape = tuple((ctypes.c_int64 * rank).from_address(shape_at)) if rank else ()
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = (ctypes.c_uint8 * max(count, 1)).from_address(self._find[kind](self._place, number))
        return np.frombuffer(memoryview(raw), np.uint8)[:count].view(dtype).reshape(shape)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        program = self._library.program
        for number, node in enumerate(program.inputs):
            there = self.array("input", number, node.tensor.rank, node.dtype.np)
            given = np.asarray(inputs[node.attrs["name"]])
            assert there.shape == given.shape, (there.shape, given.shape)
            there[...] = given
        self._library.check(self._run(self._place))
        return {
            name: self.array("output", number, node.tensor.rank, node.dtype.np).copy()
            for number, (name, node) in enumerate(zip(program.output_names, program.outputs, strict=True))
        }

    def reset(self) -> None:
        self._library.function("reset", None, ctypes.c_void_p)(self._place)

    def close(self) -> None:
        self._library.function("close", None, ctypes.c_void_p)(self._place)
