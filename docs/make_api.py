"""Writes docs/api.md and docs/ops.md from the docstrings and declarations of the package.

python docs/make_api.py            write both
python docs/make_api.py --check    say whether they are up to date (exit code 1 if not)
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parent

# What users call, in the order of the page: module, then the names shown (empty: its __all__).
MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "rlx",
        (
            "load",
            "compile",
            "from_onnx",
            "Session",
            "Options",
            "Graph",
            "jit",
            "grad",
            "value_and_grad",
            "jvp",
            "vmap",
            "lower",
            "optimize",
            "register_op",
            "register_pytree",
        ),
    ),
    ("rlx.runtime.program", ("CompiledProgram",)),
    ("rlx.runtime.stream", ("Stream",)),
    ("rlx.plan.lir", ("LirModule", "LirBufferPlan", "LirBufferSlot", "LirViewAlias", "LirIoManifest")),
    ("rlx.plan.phase", ("Phase", "PhaseSchedule", "derive_phases")),
    ("rlx.ir.module", ("MirModule",)),
    ("rlx.ir.text.diff", ("graph_diff", "structurally_equal")),
    ("rlx.ir.text.files", ("save", "load")),
    ("rlx.cost", ()),
    ("rlx.driver", ()),
    ("rlx.driver.copy", ()),
    ("rlx.dist", ()),
    ("rlx.zoo", ()),
    ("rlx.llm", ()),
    ("rlx.serve", ()),
    ("rlx.config", ("Knob", "table")),
)


def api_page() -> str:
    """The API reference."""
    lines = [
        "# API reference",
        "",
        "Written by `python docs/make_api.py` from the docstrings. Ops are listed in [ops.md](ops.md).",
        "",
    ]
    for name, wanted in MODULES:
        module = importlib.import_module(name)
        shown = wanted or tuple(getattr(module, "__all__", ()))
        lines += [f"## {name}", "", *_text(module.__doc__), ""]
        for item in shown:
            lines += [*_entry(item, getattr(module, item)), ""]
    lines += ["## rlx.errors", "", *_text(importlib.import_module("rlx.errors").__doc__), ""]
    lines += [*_errors(importlib.import_module("rlx.errors")), ""]
    return _joined(lines)


def _entry(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"### class `{name}{_signature(value)}`"
        yield ""
        yield from _text(value.__doc__)
        members = list(_members(value))
        if members:
            yield ""
            yield from members
    elif callable(value):
        yield f"### `{name}{_signature(value)}`"
        yield ""
        yield from _text(inspect.getdoc(value))
    elif isinstance(value, ModuleType):
        yield f"### module `{name}`"
        yield ""
        yield from _text(value.__doc__)
    else:
        yield f"### `{name}` = `{value!r}`"


def _members(cls: type) -> Iterator[str]:
    """Public methods and properties that the class itself or a base of this package defines."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("rlx"):
            continue
        for name, member in vars(base).items():
            if (name.startswith("_") and name != "__call__") or name in seen:
                continue
            function = getattr(member, "__func__", member)
            if isinstance(member, property):
                shown, documented = f"`{name}`", member.fget
            elif inspect.isfunction(function):
                bound = not isinstance(member, staticmethod)
                shown, documented = f"`{name}{_signature(function, drop_self=bound)}`", function
            else:
                continue
            if not inspect.getdoc(documented):
                continue
            seen.add(name)
            first = (inspect.getdoc(documented) or "").partition("\n\n")[0].replace("\n", " ")
            yield f"- {shown}: {first}"


def _signature(function: Callable[..., Any], drop_self: bool = False) -> str:
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    parameters = list(found.parameters.values())[1 if drop_self else 0 :]
    bare = [p.replace(annotation=inspect.Parameter.empty, default=_shown_default(p)) for p in parameters]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Shown:
    """A default that prints the same everywhere: objects by the name of their class."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown_default(parameter: inspect.Parameter) -> Any:
    text = repr(parameter.default)
    if " at 0x" in text or "<factory>" in text:
        return _Shown("...")
    return parameter.default


def _text(doc: str | None) -> Iterator[str]:
    """A docstring as Markdown: indented parts and examples become code."""
    if not doc:
        return
    code = False
    for line in [*inspect.cleandoc(doc).splitlines(), ""]:
        is_code = line.startswith(("    ", ">>>", "...")) or (code and bool(line.strip()))
        if is_code != code:
            yield "```" if code else ("```python" if line.startswith(">>>") else "```")
            code = is_code
        yield textwrap.dedent(line) if code and line.startswith("    ") else line
    if code:
        yield "```"


def _errors(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__:
            first = (value.__doc__ or "").strip().partition("\n")[0]
            yield f"- `{name}`: {first}"


# -- ops


def ops_page() -> str:
    """Every op: what it does, its level, its attributes, whether it has a gradient."""
    from rlx import ops
    from rlx.ir.op import Level, Role, all_ops

    declared = [op for op in all_ops() if op.role is Role.COMPUTE]
    high = [op for op in declared if op.level is Level.HIR]
    primitive = [op for op in declared if op.level is Level.MIR]
    functions = [name for name in ops.__all__ if callable(getattr(ops, name))]
    lines = [
        "# Ops",
        "",
        "Written by `python docs/make_api.py` from the declarations. Call them as `rlx.ops.<name>`;",
        "operators on nodes (`x @ w + b`, `x[1:]`) mean the same ops.",
        "",
        f"## Functions ({len(functions)})",
        "",
        "| function | what it does |",
        "|---|---|",
        *(f"| `{name}{_call(ops, name)}` | {_first(getattr(ops, name))} |" for name in sorted(functions)),
        "",
        f"## Composite ops ({len(high)})",
        "",
        "HIR: each has an expansion into primitive ops; gradient, batching and cost follow from it.",
        "",
        "| op | attributes | what it does |",
        "|---|---|---|",
        *(f"| `{op.name}` | {_attributes(op)} | {_first(op)} |" for op in high),
        "",
        f"## Primitive ops ({len(primitive)})",
        "",
        "MIR: each lowers to one form of the backend, fuses with others, and has a gradient unless the table",
        "says why not.",
        "",
        "| op | attributes | what it does | no gradient because |",
        "|---|---|---|---|",
        *(
            f"| `{op.name}` | {_attributes(op)} | {_first(op)} | {_cell(op.not_differentiable or '')} |"
            for op in primitive
        ),
        "",
    ]
    return _joined(lines)


def _call(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    return _cell(_signature(value)) if inspect.isfunction(value) else "(...)"


def _first(value: Any) -> str:
    doc = inspect.cleandoc(value.__doc__ or "")
    return _cell(doc.partition("\n\n")[0].replace("\n", " "))


def _attributes(op: Any) -> str:
    return ", ".join(f"`{name}`" for name in op.attrs)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _joined(lines: list[str]) -> str:
    """Lines as a page, without runs of blank lines."""
    out: list[str] = []
    for line in lines:
        if line.strip() or (out and out[-1]):
            out.append(line.rstrip())
    return "\n".join(out).rstrip("\n") + "\n"


PAGES: dict[str, Callable[[], str]] = {"api.md": api_page, "ops.md": ops_page}


def main(arguments: list[str]) -> int:
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(text, encoding="utf-8")
    print(f"out of date: {', '.join(stale)}" if stale else "up to date")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
