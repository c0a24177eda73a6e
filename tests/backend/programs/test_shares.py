"""What tells which kernels keep many cores waiting."""

from __future__ import annotations

import numpy as np

import rlx
from rlx import ops
from rlx_bench.shares import shares


def test_a_kernel_that_one_thread_computes_is_found() -> None:
    """The largest of all elements is one row; a matmul, and rows of a softmax, are shared."""
    g = rlx.Graph("shared or not")
    x, w = g.input("x", (512, 256), "f32"), g.input("w", (256, 512), "f32")
    g.output("top", ops.max(x, axis=(0, 1)))
    g.output("product", x @ w)
    g.output("soft", ops.softmax(x, axis=-1))
    program = rlx.compile(g, threads=1)
    rng = np.random.default_rng(0)
    feed = {
        "x": rng.standard_normal((512, 256), np.float32),
        "w": rng.standard_normal((256, 512), np.float32),
    }
    wanted = {name: value.copy() for name, value in program.run(feed).items()}
    found = shares(program, feed, 4, rounds=10)
    assert len(found) == 3
    uneven = [share for share in found if share.largest > 0.7]
    assert len(uneven) == 1
    assert "max" in uneven[0].name
    assert abs(sum(share.part for share in found) - 1) < 1e-9
    for name, value in program.run(feed).items():  # and the program is as it was
        np.testing.assert_array_equal(value, wanted[name])


def test_threads_share_a_convolution_of_one_line() -> None:
    """It has no lines to share, but pixels."""
    g = rlx.Graph("sound")
    x = g.input("x", (1, 1, 16000), "f32")
    rng = np.random.default_rng(0)
    g.output("y", ops.conv(x, rng.standard_normal((64, 1, 32), np.float32), strides=4))
    program = rlx.compile(g, threads=1)
    feed = {"x": rng.standard_normal((1, 1, 16000), np.float32)}
    wanted = program.run(feed)["y"].copy()
    found = shares(program, feed, 4, rounds=10)
    assert max(share.largest for share in found if "conv" in share.name) < 0.5
    np.testing.assert_array_equal(program.run(feed)["y"], wanted)
