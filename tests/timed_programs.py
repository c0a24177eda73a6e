"""Small programs and what their kernels took, for tests of predictions.

Microseconds of the slowest thread, the best of 40 runs on two threads, measured on two cores of an EPYC of
family 26 (Zen 5): `python tests/timed_programs.py` measures them on the machine at hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlx import ops
from rlx.ir.graph import Graph, Node
from rlx.plan.predict import predicted_steps
from rlx.records import dataclass

V4, V3 = "x86-64-v4-bf16-vnni", "x86-64-v3"


@dataclass(frozen=True)
class Timed:
    """A program of one kernel or a few, over one input, and microseconds by target."""

    shape: tuple[int, ...]
    body: Callable[[Node], Node]
    took: dict[str, float]

    def graph(self) -> Graph:
        """The program."""
        g = Graph("timed")
        g.output("y", self.body(g.input("x", self.shape, "f32")))
        return g

    def predicted(self, target: str) -> float:
        """Microseconds that its kernels are predicted to take."""
        from rlx.api.compile import plan

        steps = predicted_steps(plan(self.graph(), target=target)).values()
        return sum(step.picoseconds for step in steps) / 1e6


def norm(x: Node) -> Node:
    """A layer norm without weights over the last axis."""
    apart = x - ops.mean(x, axis=-1, keepdims=True)
    return apart * ops.rsqrt(ops.mean(apart * apart, axis=-1, keepdims=True) + 1e-5)


def norm_over_channels(x: Node) -> Node:
    """A norm over an outer axis, behind a reshape: pixels of an image become tokens."""
    return norm(ops.transpose(ops.reshape(x, (320, 4096)), (1, 0)))


def concatenated(x: Node) -> Node:
    """Parts of different images side by side, each computed where it is read."""
    small = ops.reshape(x[:, :, ::2, ::2], (1, 64, 1600))
    return ops.softmax(ops.concat([ops.reshape(x, (1, 64, 6400)), small * 2.0], axis=2) * 3.0, axis=1)


PROGRAMS: dict[str, Timed] = {
    "tanh of a row": Timed((16384,), ops.tanh, {V4: 1.5, V3: 3.0}),
    "norm of rows": Timed((512, 768), norm, {V4: 17.3, V3: 26.7}),
    "norm over channels behind a reshape": Timed(
        (1, 320, 64, 64), norm_over_channels, {V4: 230.9, V3: 222.5}
    ),
    "concatenation and product": Timed((1, 64, 80, 80), concatenated, {V4: 1345.0, V3: 1651.9}),
    "softmax of rows": Timed((1024, 1024), lambda x: ops.softmax(x, axis=-1), {V4: 71.4, V3: 191.9}),
    "sum of columns": Timed((1024, 1024), lambda x: ops.sum(x, axis=0), {V4: 115.9, V3: 107.8}),
    "transpose": Timed((1024, 1024), lambda x: ops.transpose(x, (1, 0)) * 2.0, {V4: 145.0, V3: 242.3}),
    "matmul": Timed((256, 256), lambda x: ops.tanh(x @ x), {V4: 73.8, V3: 139.8}),
}


def measure() -> None:
    """Print what the programs take here."""
    import numpy as np

    from rlx.api.compile import compile
    from rlx.target.cpu import host

    for name, timed in PROGRAMS.items():
        program = compile(timed.graph(), threads=2)
        x = np.random.default_rng(0).standard_normal(timed.shape, np.float32)
        took = sum(microseconds for _, microseconds in program.profile({"x": x}, 40))
        told = f"{took:.1f}, predicted {timed.predicted(host().name):.1f}"
        print(f"{name:<40}{host().name}: {told}", file=sys.stderr)


if __name__ == "__main__":
    measure()
