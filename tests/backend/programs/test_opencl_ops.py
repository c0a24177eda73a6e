"""Samples of every op on the OpenCL device against the reference; host steps are listed.

By default one sample per op runs, the one that asks most of it; the slow test runs all of them. Kernels of
several ops are compiled together: the driver takes longer to start a compilation than to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from op_cases import ALL_CASES, ALL_OPS, Case, assert_close, cases

from rlx.api.compile import plan
from rlx.codegen.opencl.build import OpenCLTarget, build_kernels, program_text
from rlx.codegen.opencl.printer import PrintedKernel
from rlx.driver import open_device
from rlx.ir.op import Arg
from rlx.reference.interpreter import evaluate
from rlx.runtime.device_program import DeviceProgram

# Why nodes run on the host: parts of reasons. Everything else must have an OpenCL kernel.
HOST_REASONS = (
    "form CodedContract has no",
    "form Cumulate has no",
    "form Loop has no",
    "form Scatter has no",
    "form Sort has no",
    "form Template has no",
    "convolution has no",
    "Fourier transform has no",
    "no kernel has; the host sorts them",
    "was registered without a native form",
    "can only be read by matmuls",
    "memory behind it is planned by the host",
)
HOST_DTYPES = (
    "c64",
    "c128",
    "f8e4m3fn",
    "f8e5m2",
    "f8e4m3fnuz",
    "f8e5m2fnuz",
    "f8e8m0",
    "f4e2m1",
    "i2",
    "u2",
    "i4",
    "u4",
)
OPS_PER_BUILD = 32


def hardest(samples: Sequence[Case]) -> Case:
    """The sample with NaN and infinities, else with a symbol, else the largest."""

    def rank(case: Case) -> tuple[bool, bool, int]:
        special = any(isinstance(a, Arg) and a.special for a in case.sample.args)
        return special, case.symbolic, sum(a.size for a in case.arrays)

    return max(samples, key=rank)


def check(samples: Iterable[Case]) -> int:
    """Compile all samples in one OpenCL program, run each, compare; returns how many used the device."""
    device, made, printed = open_device("opencl"), [], dict[str, PrintedKernel]()
    for case in samples:
        graph, _ = case.graph()
        lir = plan(graph, device="opencl")
        kernels = build_kernels(lir, OpenCLTarget())
        printed |= {k.name: k for k in kernels.kernels.values() if isinstance(k, PrintedKernel)}
        made.append((case, graph, lir, kernels))
    device.ensure(printed, lambda names: program_text(printed[n] for n in names))  # type: ignore[attr-defined]
    wrong = []
    for case, graph, lir, kernels in made:
        program = DeviceProgram(lir, kernels, "opencl")
        got, want = program.run(case.feed()), evaluate(graph, case.feed())
        try:
            for name, value in want.items():
                assert_close(got[name], value)
        except AssertionError as e:
            wrong.append(f"{case.id}: {e}")
        wrong += [f"{case.id}: {t}" for t in program.stats["host_thunks"] if not known_reason(t["why"])]
    assert not wrong, "\n".join(wrong)
    return sum(bool(kernels.kernels) for _, _, _, kernels in made)


def known_reason(why: str) -> bool:
    return any(part in why for part in HOST_REASONS) or why in [
        f"dtype {d} has no OpenCL kernels" for d in HOST_DTYPES
    ]


WITH_SAMPLES = [op for op in ALL_OPS if cases(op)]
PARTS = [WITH_SAMPLES[i : i + OPS_PER_BUILD] for i in range(0, len(WITH_SAMPLES), OPS_PER_BUILD)]


@pytest.mark.parametrize("ops", PARTS, ids=lambda ops: f"{ops[0].name}..{ops[-1].name}")
def test_one_sample_of_every_op(ops: list, require: Callable[[str], None]) -> None:
    require("opencl")
    assert check(hardest(cases(op)) for op in ops) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(ALL_CASES), 100))
def test_all_samples(first: int, require: Callable[[str], None]) -> None:
    require("opencl")
    check(ALL_CASES[first : first + 100])
