"""Constants of vectors in WebAssembly.

Engines need three instructions to make one where it is used, and one to read it from memory. In small loops
they keep them in registers; where a block has many, as logarithms do, they make them again and again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST = 4  # different constants of a block that engines have registers for, next to its values

_USES = re.compile(r"\s+%\S+ = (?:fadd|fsub|fmul|fdiv|add|sub|and|or|xor|select|fcmp) ")
_VECTOR = re.compile(r"<(\d+) x (?!i1>)(\w+)>")
_SPLAT = re.compile(r"splat \((\w+) ([^)]+)\)")
# One instruction makes zeros and ones; of -0.0 LLVM makes a change of signs.
_CHEAP = ("0", "-1", "true", "false", "0x0000000000000000", "0x8000000000000000")
_BITS = {"float": 32, "double": 64, "i64": 64, "i32": 32, "i16": 16, "i8": 8}


def in_memory(text: str) -> str:
    """The text of a module where blocks with many constants of vectors read them from memory.

    >>> block = [f"  %v{i} = fadd <4 x float> %x, splat (float {i}.0)" for i in range(1, 11)]
    >>> made = in_memory("\\n".join(["define void @f(<4 x float> %x) {", *block, "  ret void", "}"]))
    >>> print(*made.splitlines()[:3], made.splitlines()[11:14], sep="\\n")
    @vectors.0 = private global <4 x float> splat (float 1.0), align 16
    @vectors.1 = private global <4 x float> splat (float 2.0), align 16
    @vectors.2 = private global <4 x float> splat (float 3.0), align 16
    ['  %vector.1 = load <4 x float>, ptr @vectors.0, align 16', '  %v1 = fadd <4 x float> %x, %vector.1', \
'  %vector.2 = load <4 x float>, ptr @vectors.1, align 16']
    """
    stored: dict[str, str] = {}
    out: list[str] = []
    reads = 0
    for block in _blocks(text):
        found = [_constants(line) for line in block]
        if len({constant for line in found for constant in line}) <= MOST:
            out += block
            continue
        for line, constants in zip(block, found, strict=True):
            for constant in dict.fromkeys(constants):
                reads += 1
                place = stored.setdefault(constant, f"@vectors.{len(stored)}")
                type_, value = constant.split(" splat ")
                out.append(f"  %vector.{reads} = load {type_}, ptr {place}, align 16")
                line = line.replace(f"splat {value}", f"%vector.{reads}")
            out.append(line)
    made = [f"{place} = private global {constant}, align 16" for constant, place in stored.items()]
    return "\n".join([*made, *out]) + "\n"


def _blocks(text: str) -> Iterator[list[str]]:
    """Lines in parts that begin with a function or a label."""
    block: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" ") and block:
            yield block
            block = []
        block.append(line)
    yield block


def _constants(line: str) -> list[str]:
    """Constants of whole registers that an instruction reads, with their types."""
    if _USES.match(line) is None or (type_ := _VECTOR.search(line)) is None:
        return []
    lanes, element = int(type_[1]), type_[2]
    if lanes * _BITS.get(element, 0) % 128 or element not in _BITS:
        return []
    pairs = ((k, v) for k, v in _SPLAT.findall(line) if k == element and v not in _CHEAP)
    return [f"{type_[0]} splat ({k} {v})" for k, v in pairs]
