"""Chat templates: Jinja's syntax, parsed by jinja2 and evaluated here.

A template comes with a model file, so it is not trusted. It is never compiled to Python: an interpreter walks
its syntax tree, and knows a fixed list of nodes, filters, tests and methods. What is not on the lists is
refused by name. Steps and lengths of texts are limited, so no template runs for ever or fills the memory.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar, cast

from rlx.errors import FormatError, RlxError, UnsupportedError, how_to_install
from rlx.llm.template_values import (
    BINARY,
    FILTERS,
    METHODS,
    SELECTING,
    TESTS,
    UNDEFINED,
    LoopState,
    Namespace,
    Stop,
    Undefined,
    compare,
    elements,
    limited,
    plain,
    weight,
)

if TYPE_CHECKING:
    from jinja2 import nodes

    Call: TypeAlias = nodes.Call | nodes.Filter | nodes.Test

T = TypeVar("T")
Scope = dict[str, object]

_STEPS = 500_000
_DEPTH = 60
_SOURCE = 1 << 20
_DATE = 100  # characters of the form of a date


class Template:
    """A chat template.

    >>> greet = Template("{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}\\n{% endfor %}")
    >>> greet(messages=[{"role": "user", "content": " hi "}])
    '[user] hi\\n'
    """

    def __init__(self, source: str) -> None:
        if len(source) > _SOURCE:
            raise FormatError(f"the chat template has {len(source)} characters; {_SOURCE} are the most")
        try:
            import jinja2
        except ImportError:
            raise UnsupportedError(f"chat templates need jinja2; {how_to_install('llm')}") from None
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
        )
        try:
            self.tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:  # also numbers of any length
            line = getattr(error, "lineno", "?")
            raise FormatError(f"the chat template is not valid (line {line}): {error}") from error
        # The same messages are to give the same text on every day, unless a template insists on the date.
        self.dated = re.search(r"strftime_now\s+is\s+(not\s+)?defined", source) is None

    def __call__(self, **values: object) -> str:
        """The text for these values."""
        own = {"namespace": Namespace, "raise_exception": _refuse, "range": _range}
        if self.dated:
            own["strftime_now"] = _today
        run = _Run({**values, **own})
        try:
            return "".join(run.body(self.tree.body, run.globals))
        except RlxError:
            raise
        except _Jump as jump:
            raise FormatError(f"the chat template has a {jump.what} outside a loop") from None
        except Exception as error:
            raise FormatError(
                f"the chat template fails (line {run.line}): {error} ({type(error).__name__})"
            ) from error


class _Jump(Exception):
    def __init__(self, what: str) -> None:
        self.what = what


def _refuse(message: object = "") -> NoReturn:
    raise FormatError(f"the chat template refuses these messages: {str(message)[:400]}")


def _today(form: object) -> str:
    """The date of today; a template may ask for days, not for times."""
    text = str(form)
    if len(text) > _DATE or not set(re.findall("%(.)", text, re.DOTALL)) <= set("YymdeBbAaj%"):
        raise Stop(f"it asks for the date as {text[:_DATE]!r}")
    return datetime.date.today().strftime(text)


def _range(*limits: int) -> range:
    found = range(*limits)
    if len(found) > _STEPS:
        raise Stop(f"it makes a range of more than {_STEPS} elements")
    return found


class _Run:
    """One evaluation. Scopes are plain dicts: a loop's body has its own, as in Jinja."""

    def __init__(self, values: dict[str, object]) -> None:
        self.globals, self.steps, self.depth, self.line, self.written = values, 0, 0, 0, 0

    def step(self, node: nodes.Node) -> Callable[..., object]:
        self.count(1)
        self.line = node.lineno or self.line
        name = type(node).__name__
        found: Callable[..., object] | None = getattr(self, f"do_{name}", None)
        if found is None:
            raise Stop(f"it uses {name}, which is not allowed in chat templates")
        return found

    def charge(self, value: T) -> T:
        """A new value; large ones count as many steps, and so does what is inside them."""
        self.count(weight(limited(value), _STEPS))
        return value

    def shown(self, value: object) -> str:
        """A value as text. Lists may be in a list more than once: all of it counts before it is written."""
        if not isinstance(value, str):
            self.charge(value)
        return self.charge(plain(value))

    def copied(self, scope: Scope) -> Scope:
        """A scope inside another, which must not change that one."""
        self.count(1 + len(scope) // 16)
        return dict(scope)

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > _STEPS:
            raise Stop(f"it takes more than {_STEPS} steps")

    def body(self, statements: Sequence[nodes.Node], scope: Scope) -> Iterator[str]:
        """The text of statements."""
        for node in statements:
            yield from cast("Iterator[str]", self.step(node)(node, scope))

    def text(self, statements: Sequence[nodes.Node], scope: Scope) -> str:
        return self.charge("".join(self.body(statements, scope)))

    def value(self, node: nodes.Node, scope: Scope) -> object:
        """What an expression is."""
        self.depth += 1
        if self.depth > _DEPTH:
            raise Stop(f"it nests more than {_DEPTH} levels deep")
        try:
            return self.step(node)(node, scope)
        finally:
            self.depth -= 1

    # -- statements: they give text

    def do_Output(self, node: nodes.Output, scope: Scope) -> Iterator[str]:
        for part in node.nodes:
            text = self.shown(self.value(part, scope))
            self.written += len(text)
            limited(range(self.written))
            yield text

    def do_If(self, node: nodes.If, scope: Scope) -> Iterator[str]:
        for branch in (node, *node.elif_):
            if self.value(branch.test, scope):
                yield from self.body(branch.body, scope)
                return
        yield from self.body(node.else_, scope)

    def do_For(self, node: nodes.For, scope: Scope) -> Iterator[str]:
        if node.recursive:
            raise Stop("it uses a recursive loop, which is not allowed in chat templates")
        items = self.charge(elements(self.value(node.iter, scope)))
        if node.test is not None:
            items = [item for item in items if self.value(node.test, self.bound(node.target, item, scope))]
        state = LoopState(items)
        for i, item in enumerate(items):
            state.index0 = i
            inner = self.bound(node.target, item, scope)
            inner["loop"] = state
            try:
                yield from self.body(node.body, inner)
            except _Jump as jump:
                if jump.what == "break":
                    break
        if not items:
            yield from self.body(node.else_, scope)

    def bound(self, target: nodes.Node, item: object, scope: Scope) -> Scope:
        inner = self.copied(scope)
        self.assign(target, item, inner)
        return inner

    def assign(self, target: nodes.Node, value: object, scope: Scope) -> None:
        kind = type(target).__name__
        if kind == "Name":
            scope[cast("nodes.Name", target).name] = value
        elif kind == "Tuple":
            for part, one in zip(cast("nodes.Tuple", target).items, elements(value), strict=True):
                self.assign(part, one, scope)
        elif kind == "NSRef":
            reference = cast("nodes.NSRef", target)
            space = scope.get(reference.name)
            if not isinstance(space, Namespace):
                raise Stop(f"it sets an attribute of {reference.name!r}, which is not a namespace")
            space.values[reference.attr] = value
        else:
            raise Stop(f"it assigns to {kind}, which is not allowed in chat templates")

    def do_Assign(self, node: nodes.Assign, scope: Scope) -> Iterator[str]:
        self.assign(node.target, self.value(node.node, scope), scope)
        return iter(())

    def do_AssignBlock(self, node: nodes.AssignBlock, scope: Scope) -> Iterator[str]:
        self.assign(node.target, self.text(node.body, self.copied(scope)), scope)
        return iter(())

    def do_ExprStmt(self, node: nodes.ExprStmt, scope: Scope) -> Iterator[str]:
        self.value(node.node, scope)
        return iter(())

    def do_Macro(self, node: nodes.Macro, scope: Scope) -> Iterator[str]:
        names = [argument.name for argument in node.args]
        first = len(names) - len(node.defaults)

        def call(*given: object, **named: object) -> str:
            if len(given) > len(names) or not named.keys() <= set(names):
                raise Stop(f"it calls {node.name} with other arguments than {names}")
            inner = {**self.copied(scope), node.name: call}
            for i, name in enumerate(names):
                default = self.value(node.defaults[i - first], scope) if i >= first else UNDEFINED
                inner[name] = given[i] if i < len(given) else named.get(name, default)
            self.depth += 1
            if self.depth > _DEPTH:
                raise Stop(f"it nests more than {_DEPTH} levels deep")
            try:
                return self.text(node.body, inner)
            finally:
                self.depth -= 1

        scope[node.name] = call
        return iter(())

    def do_Break(self, node: nodes.Break, scope: Scope) -> NoReturn:
        raise _Jump("break")

    def do_Continue(self, node: nodes.Continue, scope: Scope) -> NoReturn:
        raise _Jump("continue")

    # -- expressions: they give values

    def do_Const(self, node: nodes.Const, scope: Scope) -> object:
        return node.value

    def do_TemplateData(self, node: nodes.TemplateData, scope: Scope) -> str:
        return node.data

    def do_Name(self, node: nodes.Name, scope: Scope) -> object:
        return scope.get(node.name, UNDEFINED)

    def do_List(self, node: nodes.List, scope: Scope) -> list[object]:
        return self.charge([self.value(item, scope) for item in node.items])

    def do_Tuple(self, node: nodes.Tuple, scope: Scope) -> tuple[object, ...]:
        return self.charge(tuple(self.value(item, scope) for item in node.items))

    def do_Dict(self, node: nodes.Dict, scope: Scope) -> dict[object, object]:
        return self.charge(
            {self.value(pair.key, scope): self.value(pair.value, scope) for pair in node.items}
        )

    def do_CondExpr(self, node: nodes.CondExpr, scope: Scope) -> object:
        if self.value(node.test, scope):
            return self.value(node.expr1, scope)
        return UNDEFINED if node.expr2 is None else self.value(node.expr2, scope)

    def do_Not(self, node: nodes.Not, scope: Scope) -> bool:
        return not self.value(node.node, scope)

    def do_And(self, node: nodes.And, scope: Scope) -> object:
        return self.value(node.left, scope) and self.value(node.right, scope)

    def do_Or(self, node: nodes.Or, scope: Scope) -> object:
        return self.value(node.left, scope) or self.value(node.right, scope)

    def do_Neg(self, node: nodes.Neg, scope: Scope) -> object:
        return BINARY["Sub"](0, self.value(node.node, scope))

    def binary(self, node: nodes.BinExpr, scope: Scope) -> object:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        return self.charge(BINARY[type(node).__name__](left, right))

    do_Add = do_Sub = do_Mul = do_Div = do_FloorDiv = do_Mod = binary

    def do_Concat(self, node: nodes.Concat, scope: Scope) -> str:
        return self.charge("".join([self.shown(self.value(part, scope)) for part in node.nodes]))

    def do_Compare(self, node: nodes.Compare, scope: Scope) -> bool:
        left = self.value(node.expr, scope)
        for part in node.ops:
            right = self.value(part.expr, scope)
            self.charge((left, right))
            if not compare(part.op, left, right):
                return False
            left = right
        return True

    def do_Slice(self, node: nodes.Slice, scope: Scope) -> slice:
        return slice(
            *(None if p is None else self.value(p, scope) for p in (node.start, node.stop, node.step))
        )

    def do_Getitem(self, node: nodes.Getitem, scope: Scope) -> object:
        owner, key = self.value(node.node, scope), self.value(node.arg, scope)
        found = _item(owner, key)
        return self.charge(found) if isinstance(key, slice) else found  # a slice is a copy

    def do_Getattr(self, node: nodes.Getattr, scope: Scope) -> object:
        return _attribute(self.value(node.node, scope), node.attr)

    def arguments(self, node: Call, scope: Scope) -> tuple[list[object], Scope]:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise Stop("it uses * or ** in a call, which is not allowed in chat templates")
        named = {str(part.key): self.value(part.value, scope) for part in node.kwargs}
        return [self.value(part, scope) for part in node.args], named

    def do_Call(self, node: nodes.Call, scope: Scope) -> object:
        given, named = self.arguments(node, scope)
        self.charge((given, named))
        if type(node.node).__name__ == "Getattr":
            member = cast("nodes.Getattr", node.node)
            owner, name = self.value(member.node, scope), member.attr
            method = METHODS.get((type(owner), name))
            if method is not None:
                return self.charge(method(owner, *given, **named))
            called = _attribute(owner, name)
        else:
            called, name = self.value(node.node, scope), getattr(node.node, "name", "a value")
        if not callable(called):
            raise Stop(f"it calls {name}, which is not a function of chat templates")
        return self.charge(called(*given, **named))

    def do_Filter(self, node: nodes.Filter, scope: Scope) -> object:
        if node.name not in FILTERS:
            raise Stop(f"it uses the filter {node.name!r}, which is not allowed in chat templates")
        given, named = self.arguments(node, scope)
        value = self.charge(self._subject(node, scope))
        work = weight((given, named), _STEPS)
        self.count(work * len(elements(value)) if node.name in SELECTING else work)
        return self.charge(FILTERS[node.name](value, *given, **named))

    def do_Test(self, node: nodes.Test, scope: Scope) -> bool:
        if node.name not in TESTS:
            raise Stop(f"it uses the test {node.name!r}, which is not allowed in chat templates")
        given, named = self.arguments(node, scope)
        subject = self._subject(node, scope)
        if given:  # it is compared with them
            self.charge((subject, given))
        return bool(TESTS[node.name](subject, *given, **named))

    def _subject(self, node: nodes.Filter | nodes.Test, scope: Scope) -> object:
        """What a filter or test is about; a block of text (filter blocks) is not allowed."""
        if node.node is None:
            raise Stop("it uses a filter block, which is not allowed in chat templates")
        return self.value(node.node, scope)


def _item(owner: object, key: object) -> object:
    """owner[key]; what is not there is undefined, as in Jinja."""
    if isinstance(owner, Undefined):
        raise Stop(f"it asks for {key!r} of a value that is not defined")
    if isinstance(owner, Mapping):
        return owner.get(key, UNDEFINED)
    if isinstance(owner, str | list | tuple) and isinstance(key, int | slice):
        try:
            return owner[key]
        except IndexError:
            return UNDEFINED
    return UNDEFINED if not isinstance(key, str) else _attribute(owner, key)


def _attribute(owner: object, name: str) -> object:
    """owner.name: a member of a mapping, or of what the interpreter made itself; never one of an object."""
    if isinstance(owner, Undefined):
        raise Stop(f"it asks for {name!r} of a value that is not defined")
    if isinstance(owner, Mapping):
        return owner.get(name, UNDEFINED)
    if isinstance(owner, Namespace):
        return owner.values.get(name, UNDEFINED)
    if isinstance(owner, LoopState):
        return owner.get(name)
    return UNDEFINED
