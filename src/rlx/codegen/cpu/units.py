"""The functions of a program in units: each is a separate module of LLVM IR, compiled in parallel.

A function is in one unit only, and units that need it call it there: what kernels share is compiled once, and
so are functions that kernels have for themselves and that turn out to be equal. A unit calls functions of its
own or of units before it, so objects are linked in the order of their units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from rlx.codegen.native.irtext import Module

UNIT_LINES = 2000
"""A unit that has as many lines is compiled while the next one is written: few, to keep all cores busy to the
end."""
_NAME = re.compile(r"@([\w.$-]+)")
_SELF = "@\0"  # stands for a function's own name where functions are compared


class Units:
    """Takes what is written to a module; `each` gets the text of every unit as soon as it is complete.

    >>> from rlx.target.cpu import resolve
    >>> module = Module(resolve("x86-64"))
    >>> units = Units(module)
    >>> for name in ("k0", "k1"):
    ...     f = module.function(name, [("ptr", "x")])
    ...     f.store(f.load("float", f.args[0]), f.args[0])
    ...     units.collect()
    >>> units.finish()
    >>> units.name("k1"), len(units.texts)
    ('k0', 1)
    """

    def __init__(self, module: Module, each: Callable[[str], None] = lambda text: None) -> None:
        self.module, self.each = module, each
        self.texts: list[str] = []
        self._names: dict[str, str] = {}  # function or table -> the equal one that stands for it
        self._known: dict[bytes, str] = {}  # digest of a text without its own name -> that name
        self._tables: dict[str, str] = {}
        self._declarations: dict[str, str] = {}
        self._unit: dict[str, str] = {}  # texts of functions that are in no unit yet

    def name(self, function: str) -> str:
        """The function that is called where `function` is meant."""
        return self._names[function]

    def collect(self) -> None:
        """Take the functions that are complete, which all are between two kernels."""
        functions = {f.name: f for f in self.module.take()}
        texts = {name: f.text() for name, f in functions.items()}
        for name in texts:
            self._settle(name, texts)
        for name, function in functions.items():
            if self._names[name] == name:
                self._declarations[name] = function.declaration()
        if sum(text.count("\n") for text in self._unit.values()) >= UNIT_LINES:
            self.finish()

    def finish(self) -> None:
        """What comes next is in another unit."""
        if self._unit:
            self.texts.append(self._text())
            self._unit = {}
            self.each(self.texts[-1])

    def _settle(self, name: str, texts: dict[str, str]) -> None:
        """Keep a function or table under its name unless an equal one is known; what it uses comes first."""
        if name in self._names:
            return
        self._names[name] = name
        is_function = name in texts
        text = texts[name] if is_function else self.module.tables[name]
        for used in dict.fromkeys(_NAME.findall(text)):
            if used in texts or used in self.module.tables:
                self._settle(used, texts)
        names = self._names

        def named(found: re.Match[str]) -> str:
            return _SELF if found[1] == name else f"@{names.get(found[1], found[1])}"

        text = _NAME.sub(named, text)
        digest = blake2b(text.encode()).digest()
        names[name] = self._known.setdefault(digest, name)
        if names[name] == name:
            whole = text.replace(_SELF, "@" + name)
            if is_function:
                self._unit[name] = whole.replace("define internal ", "define hidden ", 1)
            else:
                self._tables[name] = whole

    def _text(self) -> str:
        used = {name for text in self._unit.values() for name in _NAME.findall(text)}
        tables = {name: self._tables[name] for name in sorted(used & self._tables.keys())}
        used.update(name for body in tables.values() for name in _NAME.findall(body))
        outside = sorted(used - self._unit.keys() - tables.keys())
        declared = [self._declarations.get(name) or self.module.declared[name] for name in outside]
        return self.module.assembled(tables, declared, list(self._unit.values()))


def excerpt(texts: Sequence[str], function: str) -> str:
    """A module with one function of units, then everything that it uses, in whichever unit that is.

    >>> first = "define void @a() {\\n  ret void\\n}\\n"
    >>> second = "declare void @a()\\ndefine void @b() {\\n  call void @a()\\n  ret void\\n}\\n"
    >>> print(excerpt([first, second + "attributes #0 = { nounwind }\\n"], "b"))
    define void @b() {
      call void @a()
      ret void
    }
    define void @a() {
      ret void
    }
    attributes #0 = { nounwind }
    """
    parts: dict[str, str] = {}
    for text in texts:
        for part in _parts(text):
            name = part if part.startswith("attributes ") else _NAME.findall(part.partition("\n")[0])[0]
            if name not in parts or not part.startswith("declare "):
                parts[name] = part
    used = {function: parts[function]}
    waiting = [function]
    while waiting:
        for name in _NAME.findall(parts[waiting.pop(0)]):
            if name not in used:
                used[name] = parts[name]
                waiting.append(name)
    attributes = [part for part in parts.values() if part.startswith("attributes ")]
    return "\n".join([*used.values(), *attributes]) + "\n"


def _parts(text: str) -> Iterator[str]:
    """The functions of a module, and its lines between them."""
    inside: list[str] = []
    for line in text.splitlines():
        inside.append(line)
        if not inside[0].startswith("define ") or line == "}":
            yield "\n".join(inside)
            inside = []
