"""Lines of the notation in assembly: what LLVM knows as debug information, shown as comments.

A module that notes source lines (`Module(source_lines=True)`) has comments like `; pool.py:70  count += 1`,
which LLVM drops. `with_debug_lines` makes them the locations of instructions. LLVM keeps these through its
passes and writes them into the assembly as directives, which `as_comments` turns into comments again. The
instructions stay what they are without.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"  ; (\S+\.py):(\d+)  (.*)", re.MULTILINE)
_FUNCTION = re.compile(r"define .*@([\w.$-]+)\(")
_FILE = re.compile(r"\t\.file\t(\d+) (?:\"[^\"]*\" )?\"([^\"]*)\"")
_PLACE = re.compile(r"\t\.loc\t(\d+) (\d+) ")
_MORE = re.compile(r"\t\.cfi_.*|\.L(tmp|func_begin)\d+:.*")
"""Directives and labels that only debug information needs."""


class _Metadata:
    """Numbered lines at the end of a module."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[str, str] = {}

    def add(self, text: str) -> str:
        """The number of a line; equal ones are one, unless they are distinct."""
        if text not in self._known or text.startswith("distinct"):
            self._known[text] = f"!{len(self.lines)}"
            self.lines.append(f"!{len(self.lines)} = {text}")
        return self._known[text]

    def file(self, name: str) -> str:
        return self.add(f'!DIFile(filename: "{name}", directory: "")')


def with_debug_lines(text: str) -> str:
    """The module, with the lines that its comments note as locations of what follows them.

    >>> text = "define void @f() {\\nentry:\\n  ; pool.py:7  return\\n  ret void\\n}"
    >>> print("\\n".join(with_debug_lines(text).splitlines()[:4]))
    define void @f() !dbg !4 {
    entry:
      ; pool.py:7  return
      ret void, !dbg !8
    """
    made = _Metadata()
    unit = made.add(
        "distinct !DICompileUnit(language: DW_LANG_C, file: !1, isOptimized: true, runtimeVersion: 0, "
        "emissionKind: LineTablesOnly)"
    )
    whole = made.file("kernel")
    flags = made.add('!{i32 2, !"Debug Info Version", i32 3}')
    nothing = made.add("!DISubroutineType(types: !{})")
    out: list[str] = []
    scope = place = ""
    for line in text.splitlines():
        mark, function = _MARK.fullmatch(line), _FUNCTION.match(line)
        if function is not None:
            scope = made.add(
                f'distinct !DISubprogram(name: "{function[1]}", scope: {whole}, file: {whole}, '
                f"type: {nothing}, unit: {unit}, spFlags: DISPFlagDefinition | DISPFlagOptimized)"
            )
            place = made.add(f"!DILocation(line: 0, scope: {scope})")  # what no line of the notation wrote
            line = line.removesuffix(" {") + f" !dbg {scope} {{"
        elif mark is not None:
            block = made.add(
                f"!DILexicalBlockFile(scope: {scope}, file: {made.file(mark[1])}, discriminator: 0)"
            )
            place = made.add(f"!DILocation(line: {mark[2]}, scope: {block})")
        elif line == "}":
            scope = ""
        elif scope and line.startswith("  ") and not line.startswith("  ;"):
            line = f"{line}, !dbg {place}"
        out.append(line)
    named = [f"!llvm.dbg.cu = !{{{unit}}}", f"!llvm.module.flags = !{{{flags}}}"]
    return "\n".join([*out, *named, *made.lines]) + "\n"


def as_comments(assembly: str, text: str) -> str:
    """Assembly of `text` with comments in place of debug information.

    >>> lines = ['\\t.file\\t1 "" "pool.py"', "f:", ".Lfunc_begin0:", "\\t.loc\\t1 7 0", "\\tretq"]
    >>> as_comments("\\n".join(lines), "  ; pool.py:7  return")
    'f:\\n\\t# pool.py:7  return\\n\\tretq'
    """
    lines = assembly.splitlines()
    files = {found[1]: found[2] for line in lines if (found := _FILE.match(line))}
    sources = {(found[1], found[2]): found[3] for found in _MARK.finditer(text)}
    out: list[str] = []
    is_debug, last = False, ""
    for line in lines:
        if line.startswith("\t.section"):
            is_debug = line.startswith("\t.section\t.debug_")
        place = _PLACE.match(line)
        if place is not None:
            file, number = files[place[1]], place[2]
            shown = f"\t# {file}:{number}  {sources.get((file, number), '')}"
            if number != "0" and shown != last:
                out.append(shown)
                last = shown
        elif not (is_debug or _FILE.match(line) or _MORE.fullmatch(line)):
            out.append(line)
            last = "" if line.endswith(":") else last
    return "\n".join(out)
