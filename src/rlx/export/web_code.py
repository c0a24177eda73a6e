"""The code of kernels as engines of WebAssembly run it fastest.

Constants of vectors: engines need three instructions to make one where it is used, and one to read it from
memory. In small loops they keep them in registers; where a block has many, as logarithms do, they make them
again and again.

Addresses: an instruction that reads or writes memory adds a constant to an address for nothing, but as a
number that must not wrap around. LLVM has to be told so, and forgets it where it changes the addresses of a
loop: then engines add each constant by an instruction of its own, to a register of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlx.records import dataclass

MOST = 4  # different constants of a block that engines have registers for, next to its values

_USES = re.compile(r"\s+%\S+ = (?:fadd|fsub|fmul|fdiv|add|sub|and|or|xor|select|fcmp) ")
_VECTOR = re.compile(r"<(\d+) x (?!i1>)(\w+)>")
_SPLAT = re.compile(r"splat \((\w+) ([^)]+)\)")
# One instruction makes zeros and ones; of -0.0 LLVM makes a change of signs.
_CHEAP = ("0", "-1", "true", "false", "0x0000000000000000", "0x8000000000000000")
_BITS = {"float": 32, "double": 64, "i64": 64, "i32": 32, "i16": 16, "i8": 8}
LOWEST = 1 << 16
"""The first address that anything has: minus an offset below this, an address in use is not negative."""

_ACCESS = re.compile(r"(  (?:%\S+ = load [^,]+|store .+?), ptr )(%[\w.]+)(, align .*)$")
_POINTER = re.compile(r"  (%[\w.]+) = getelementptr (\w+|<\d+ x \w+>), ptr (%[\w.]+), i64 (\S+)$")
_INDEX = re.compile(r"  (%[\w.]+) = (add|sub|mul|shl)(?: nuw| nsw)* i64 (\S+), (\S+)$")
_SIZES = {**_BITS, "ptr": 32, "half": 16, "bfloat": 16}


def for_engines(kernel: str) -> str:
    """The text of a kernel as engines run it fastest."""
    return with_offsets(in_memory(kernel))


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


# -- addresses


@dataclass(frozen=True)
class _Made:
    """A part of an index that varies, computed from others."""

    operation: str
    left: _Made | str
    right: _Made | str


def with_offsets(text: str) -> str:
    """The text of a module whose accesses have constants apart from their addresses.

    >>> lines = ["define float @f(ptr %p, i64 %i) {", "  %j = add i64 %i, 3"]
    >>> lines += ["  %q = getelementptr float, ptr %p, i64 %j", "  %x = load float, ptr %q, align 4", "}"]
    >>> print(*with_offsets("\\n".join(lines)).splitlines()[3:-1], sep="\\n")
      %base.3 = getelementptr float, ptr %p, i64 %i
      %base.4 = call ptr asm "", "=r,0"(ptr %base.3)
      %base.5 = getelementptr nuw i8, ptr %base.4, i64 12
      %x = load float, ptr %base.5, align 4
    """
    out: list[str] = []
    function: list[str] = []
    for line in text.splitlines():
        function.append(line)
        if line == "}":
            out += _Function(function).lines()
            function = []
    return "\n".join([*out, *function]) + "\n"


class _Function:
    """One function: where its addresses and their indices come from.

    An instruction traps where the address that it is given, before the offset, has wrapped around. Those that
    are made here have not: what is read or written is at `LOWEST` or beyond, and offsets are smaller.
    """

    def __init__(self, lines: list[str]) -> None:
        self.text = lines
        self.pointers: dict[str, tuple[str, str, str]] = {}
        self.indices: dict[str, tuple[str, str, str]] = {}
        for line in lines:
            if (found := _POINTER.match(line)) is not None:
                self.pointers[found[1]] = (found[2], found[3], found[4])
            elif (found := _INDEX.match(line)) is not None:
                self.indices[found[1]] = (found[2], found[3], found[4])
        self.made: dict[str, str] = {}  # instructions of this block, by what they compute
        self.splits: dict[str, tuple[_Made | str, int]] = {}
        self.out: list[str] = []

    def lines(self) -> list[str]:
        for line in self.text:
            if not line.startswith(" "):
                self.made = {}
            elif (found := _ACCESS.match(line)) is not None:
                line = f"{found[1]}{self.address(found[2])}{found[3]}"
            self.out.append(line)
        return self.out

    def address(self, pointer: str) -> str:
        """The same address, or one with its constant apart."""
        base, offset = pointer, 0
        while base in self.pointers:
            type_, start, index = self.pointers[base]
            root, constant = self.split(index)
            if constant < 0 or (constant == 0 and root != "0"):
                break
            offset += constant * _size(type_)
            if root != "0":
                base = self.new(f"getelementptr {type_}, ptr {start}, i64 {self.index(root)}")
                break
            base = start
        if not 0 < offset < LOWEST:
            return pointer
        # LLVM changes no address that it cannot see through.
        held = self.new(f'call ptr asm "", "=r,0"(ptr {base})')
        return self.new(f"getelementptr nuw i8, ptr {held}, i64 {offset}")

    def split(self, index: str) -> tuple[_Made | str, int]:
        """An index as a part that varies, or "0", and a constant."""
        if index not in self.indices:
            return (index, 0) if index.startswith("%") else ("0", int(index))
        if index not in self.splits:
            self.splits[index] = self._split(index)
        return self.splits[index]

    def _split(self, index: str) -> tuple[_Made | str, int]:
        operation, left, right = self.indices[index]
        (a, from_a), (b, from_b) = self.split(left), self.split(right)
        if from_a == from_b == 0:
            return index, 0
        if operation == "add":
            return b if a == "0" else a if b == "0" else _Made(operation, a, b), from_a + from_b
        if operation == "sub":
            return a if b == "0" else _Made(operation, a, b), from_a - from_b
        if operation == "mul" and a == "0":
            (a, from_a), (b, from_b) = (b, from_b), (a, from_a)
        if b != "0":
            return index, 0
        factor = from_b if operation == "mul" else 1 << from_b
        return "0" if a == "0" else _Made("mul", a, str(factor)), from_a * factor

    def index(self, root: _Made | str) -> str:
        """The name of a part that varies."""
        if isinstance(root, str):
            return root
        return self.new(f"{root.operation} i64 {self.index(root.left)}, {self.index(root.right)}")

    def new(self, text: str) -> str:
        """The result of an instruction, which is written once in a block."""
        if text not in self.made:
            self.made[text] = f"%base.{len(self.out)}"
            self.out.append(f"  {self.made[text]} = {text}")
        return self.made[text]


def _size(type_: str) -> int:
    """Bytes of an element."""
    if type_.startswith("<"):
        lanes, _, element = type_.strip("<>").partition(" x ")
        return int(lanes) * _size(element)
    return _SIZES[type_] // 8
