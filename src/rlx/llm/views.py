"""Tensors made of others: what some folders store in one tensor or apart, as the decoder takes it."""

from __future__ import annotations

import numpy as np

from rlx.errors import FormatError
from rlx.kernel.nibbles import unpacked
from rlx.llm.blocks import FORMATS, Groups, halved_powers
from rlx.llm.hf import check_numbers
from rlx.llm.tensors import Array, Entry
from rlx.records import dataclass

_MXFP4 = FORMATS[39]
_HALVES = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}  # gpt-oss has their rows in turns


@dataclass(frozen=True, eq=False)
class Picked(Entry):
    """Some elements of the last axis of a tensor; with `turned`, the last two axes change places."""

    base: Entry
    every: slice
    turned: bool

    def array(self) -> Array:
        value = self.base.array()[..., self.every]
        return np.ascontiguousarray(np.swapaxes(value, -1, -2) if self.turned else value)


@dataclass(frozen=True, eq=False)
class Blocks(Entry):
    """Some rows of matrices [experts, rows, columns] in MXFP4, whose exponents are another tensor of bytes.

    `base` is [experts, rows, groups, 16], with two neighbours in each byte, the first in its low half.
    """

    base: Entry
    exponents: Entry
    every: slice

    def mxfp4(self) -> tuple[Array, Array]:
        pairs = self.base.array()[:, self.every].reshape(-1, _MXFP4.size // 2)
        first, last = pairs[:, :8], pairs[:, 8:]  # of a block: numbers 0 to 15, and 16 to 31
        codes = np.empty_like(pairs)
        codes[:, ::2] = first & 15 | last << 4
        codes[:, 1::2] = first >> 4 | last & 240
        exponents = self.exponents.array()[:, self.every].ravel()
        for part in (self.base, self.exponents):
            part.source.check()
        return codes, exponents

    def groups(self) -> Groups:
        codes, exponents = self.mxfp4()
        columns = self.shape[-1]
        powers = halved_powers(exponents).reshape(-1, columns // _MXFP4.size)
        return Groups(unpacked(codes, "e2m1").reshape(-1, columns), powers)


def expert_tensors(path: str, at: str, found: dict[str, Entry]) -> dict[str, Entry]:
    """The experts of a layer of gpt-oss by GGUF's names: gate, up and down apart, as [experts, out, in].

    `found` has what its folders call gate_up_proj and down_proj: numbers [experts, in, out] or _blocks and
    _scales, and each _bias.
    """
    made: dict[str, Entry] = {}
    for name, halves in (("gate_up_proj", _HALVES), ("down_proj", {"down": slice(None)})):
        for half, every in halves.items():
            stem = f"{at}.ffn_{half}_exps"
            if f"{name}_blocks" in found:
                codes, powers = (_needed(path, found, f"{name}_{part}") for part in ("blocks", "scales"))
                made[f"{stem}.weight"] = _blocks(path, f"{stem}.weight", codes, powers, every)
            elif name in found:
                made[f"{stem}.weight"] = _picked(path, f"{stem}.weight", found[name], every, 3)
            if f"{name}_bias" in found:
                made[f"{stem}.bias"] = _picked(path, f"{stem}.bias", found[f"{name}_bias"], every, 2)
    return made


def _needed(path: str, found: dict[str, Entry], name: str) -> Entry:
    if name not in found:
        raise FormatError(f"{path} has blocks of experts without their tensor {name!r}")
    return found[name]


def _picked(path: str, name: str, base: Entry, every: slice, rank: int) -> Picked:
    check_numbers(path, base)
    if len(base.shape) != rank:
        raise FormatError(f"{path}: tensor {base.name!r} has the shape {list(base.shape)}, not {rank} axes")
    *lead, columns = base.shape
    count = len(range(columns)[every])
    shape = (*lead[:-1], count, lead[-1]) if rank == 3 else (*lead, count)
    return Picked(name, shape, base.format, base.source, base.offset, base, every, rank == 3)


def _blocks(path: str, name: str, base: Entry, exponents: Entry, every: slice) -> Blocks:
    experts, rows, groups, size = base.shape if len(base.shape) == 4 else (0, 0, 0, 0)
    are_bytes = base.format.name == exponents.format.name == "U8"
    if not are_bytes or size != _MXFP4.size // 2 or exponents.shape != (experts, rows, groups):
        raise FormatError(
            f"{path}: tensor {base.name!r} is {base.format.name}{list(base.shape)} and its scales are "
            f"{exponents.format.name}{list(exponents.shape)}; MXFP4 has bytes [experts, rows, groups, 16] "
            "and [experts, rows, groups]"
        )
    shape = (experts, len(range(rows)[every]), groups * _MXFP4.size)
    return Blocks(name, shape, _MXFP4, base.source, base.offset, base, exponents, every)
