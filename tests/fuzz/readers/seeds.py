"""Sound inputs to start from: `python tests/fuzz/readers/seeds.py FOLDER` writes a folder for each reader."""

from __future__ import annotations

import io
import json
import struct
import sys
import tempfile
import wave
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from readers import END

import rlx
from rlx.api.compile import plan
from rlx.fuzz.documents import graph_of
from rlx.fuzz.onnx_models import model_files
from rlx.ir.graph import Graph
from rlx.ir.text import files as serialize
from rlx.ir.text.container import ALIGNMENT, PREFIX_BYTES
from rlx.ir.text.write import graph_text
from rlx.ir.weights import round_up
from rlx.plan import files as plans
from rlx.plan.text import module_text
from rlx.runtime.store import container

LARGEST = 12_000  # bytes


def graphs() -> Iterator[Graph]:
    g = rlx.Graph("all kinds")
    x = g.input("x", ("n", 4), "f32")
    y = x @ g.param("w", (4, 3), "f32", np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    g.set_state("s", g.state("s", (3,), "f32", np.zeros(3, np.float32)) + rlx.ops.sum(y, axis=0))
    y = rlx.ops.cond(rlx.ops.all(y[0] > 0), lambda v: v * 2.0, lambda v: -v, y)
    g.output("y", rlx.ops.scan(lambda c, row: (c + row, c), g.constant(np.zeros(3, np.float32)), y)[1])
    yield g
    for number in range(40):
        graph = graph_of(5, number)
        if graph is not None:
            yield graph


def text_seeds() -> Iterator[bytes]:
    for graph in graphs():
        yield graph_text(graph).encode()
        yield module_text(plan(graph), {}).encode()


def _without_prefix(path: Path) -> bytes:
    """Header and rest of a file, as `readers` takes them."""
    raw = path.read_bytes()
    end = PREFIX_BYTES + struct.unpack_from("<Q", raw, 16)[0]
    return raw[PREFIX_BYTES:end] + END + raw[round_up(end, ALIGNMENT) :]


def container_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for graph in list(graphs())[:6]:
            path = Path(folder, "a.rlx")
            rlx.compile(graph, cache=False).save(path)
            file = container.Container(path)
            parts = {name: b"" if "." in name else file.part(name) for name in file.part_names}
            arrays = [np.array(file.array(i)) for i in range(file.array_count)]
            container.write(path, file.facts, parts, arrays)
            yield _without_prefix(path)


def onnx_seeds() -> Iterator[bytes]:
    for path in model_files()[::3]:
        yield path.read_bytes()


def weight_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        for graph in list(graphs())[:4]:
            path = Path(folder, "a")
            serialize.save(graph, path)
            yield b"g" + _without_prefix(path)
            plans.save(plan(graph), path)
            yield b"p" + _without_prefix(path)
    for array in (np.arange(5, dtype=np.float32), np.zeros((2, 0), np.int8), np.array(True)):
        file = io.BytesIO()
        np.save(file, array)
        yield b"n" + file.getvalue()
    sound = io.BytesIO()
    with wave.open(sound, "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(8000)
        out.writeframes(bytes(range(20)))
    yield b"w" + sound.getvalue()
    yield b"s" + np.array([0, 1, 1, 2, 3, 3, 6, 0, 2], np.int64).tobytes()
    for colour, channels in ((0, 1), (2, 3), (3, 1), (6, 4)):
        rows = zlib.compress(b"".join(bytes([kind]) + bytes(2 * channels) for kind in range(5)))
        yield b"i\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I4s", len(body), kind) + body + bytes(4)
            for kind, body in (
                (b"IHDR", struct.pack(">IIBBBBB", 2, 5, 8, colour, 0, 0, 0)),
                (b"PLTE", bytes(9)),
                (b"IDAT", rows),
                (b"IEND", b""),
            )
        )


SEEDS = {"text": text_seeds, "container": container_seeds, "onnx": onnx_seeds, "weights": weight_seeds}


def main() -> None:
    counts = {}
    for name, make in SEEDS.items():
        folder = Path(sys.argv[1], name)
        folder.mkdir(parents=True, exist_ok=True)
        kept = [seed for seed in make() if len(seed) <= LARGEST]
        for number, seed in enumerate(kept):
            (folder / f"seed-{number:03}").write_bytes(seed)
        counts[name] = len(kept)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
