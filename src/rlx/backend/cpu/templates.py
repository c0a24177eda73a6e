"""Kernels of templates, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backend.cpu.fft import emit_fft
from rlx.backend.cpu.frame import EmittedKernel, Slot
from rlx.backend.cpu.irtext import Module
from rlx.errors import UnsupportedError
from rlx.ir.form import Template

KINDS: dict[str, Callable[..., EmittedKernel]] = {"fft": emit_fft}


def emit_template(
    module: Module, name: str, form: Template, inputs: Sequence[Slot], outputs: Sequence[Slot]
) -> EmittedKernel:
    """Write the kernel of a template; UnsupportedError where this backend has none of its kind."""
    if form.kind not in KINDS:
        raise UnsupportedError(f"template {form.kind!r} has no native kernel")
    return KINDS[form.kind](module, name, form, inputs, outputs)
