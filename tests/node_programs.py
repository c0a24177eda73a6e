"""Programs exported to WebAssembly in tests: run by Node, through the ES module that users load."""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from exported_programs import feed_files
from rlx.runtime.program import CompiledProgram

SCRIPT = Path(__file__).parent / "backend" / "export" / "run_cases.mjs"


class Node:
    """A process of Node that runs one export after the other."""

    @staticmethod
    def flags() -> list[str]:
        """What relaxed SIMD needs: the first compiler of older ones multiplies bytes of seven bits wrong."""
        version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
        older = int(version.lstrip("v").partition(".")[0]) < 22
        return ["--experimental-wasm-relaxed-simd", "--no-liftoff"] if older else []

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = ["node", *self.flags(), str(SCRIPT)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def run(
        self,
        program: CompiledProgram,
        sizes: dict[str, int],
        feed: dict[str, np.ndarray],
        target: str,
        threads: int = 1,
    ) -> dict[str, np.ndarray]:
        assert self.process.stdin and self.process.stdout
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ranges = {symbol: (0, size + 3) for symbol, size in sizes.items()}
            program.export(folder, "wasm", bind=ranges, name="net", target=target)
            feed_files(folder, (feed[node.attrs["name"]] for node in program.inputs))
            asked = {"folder": name, "sizes": sizes, "threads": threads}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        out = {}
        for node, output, text in zip(program.outputs, program.output_names, answer["outputs"], strict=True):
            raw = np.frombuffer(base64.b64decode(text), np.uint8)
            out[output] = raw.view(node.dtype.np).reshape(node.tensor.bind(sizes))
        return out
