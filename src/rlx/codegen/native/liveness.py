"""Which names a native function may still read, at each `if` and loop: only these need a phi.

`facts` walks a function once and notes for every statement what it reads, assigns and leaves. `Liveness` then
goes backwards over the statements. `merged` of an `if` are the names that a side assigns and that may be
read afterwards; `merged` of a loop are those that its body assigns and that its next round, or what follows
it, may read. Names come in the order of their first assignment, so that the emitted code is always the same.

>>> tree = ast.parse("def f(n):\\n t = 0\\n while t < n:\\n  u = t\\n  t = u + 1\\n return t")
>>> loop = tree.body[0].body[1]
>>> Liveness(tree.body[0]).merged(loop)
['t']
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Facts:
    """What one statement does, its inner statements included."""

    __slots__ = ("assigned", "captured", "leaving", "reads", "refused", "returns")

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self.assigned: dict[str, None] = {}  # in the order of the source
        self.captured: set[str] = set()  # read by nested functions, which may run at any later time
        self.returns = False
        self.leaving: ast.stmt | None = None  # a break or continue that belongs to the loop around
        self.refused: ast.AST | None = None

    def include(self, other: Facts) -> None:
        self.reads |= other.reads
        self.assigned.update(other.assigned)
        self.captured |= other.captured
        self.returns = self.returns or other.returns
        self.leaving = self.leaving or other.leaving
        self.refused = self.refused or other.refused


def facts(node: ast.stmt, refused: tuple[type[ast.AST], ...] = ()) -> Facts:
    """What a statement does; `refused` are the kinds of syntax to look for."""
    kept = vars(node)
    found: Facts | None = kept.get("facts")
    if found is None:
        found = kept["facts"] = _gather(node, refused)
    return found


def forget(node: ast.stmt) -> None:
    """Gather the facts again when they are asked for: the statement has changed."""
    del vars(node)["facts"]


def combined(body: Sequence[ast.stmt]) -> Facts:
    """What several statements do."""
    whole = Facts()
    for statement in body:
        whole.include(facts(statement))
    return whole


def _gather(node: ast.stmt, refused: tuple[type[ast.AST], ...]) -> Facts:
    made = Facts()
    if isinstance(node, refused):
        made.refused = node
    if isinstance(node, ast.FunctionDef):
        inner = Facts()
        for statement in node.body:
            inner.include(facts(statement, refused))
        made.captured = (inner.reads | inner.captured) - _parameters(node.args) - inner.assigned.keys()
        made.assigned[node.name] = None
        made.refused = made.refused or inner.refused
        _expression(node.args, made, refused)
        made.reads |= made.captured
        return made
    parts = [node.value, *node.targets] if isinstance(node, ast.Assign) else _children(node)
    for part in parts:
        if isinstance(part, ast.stmt):
            made.include(facts(part, refused))
        else:
            _expression(part, made, refused)
    if isinstance(node, ast.Return):
        made.returns = True
    elif isinstance(node, ast.Break | ast.Continue):
        made.leaving = node
    elif isinstance(node, ast.For | ast.While):
        made.leaving = None
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        made.reads.add(node.target.id)
    return made


def _expression(node: ast.AST, made: Facts, refused: tuple[type[ast.AST], ...], own: bool = True) -> None:
    """Add what an expression reads; of comprehensions and lambdas, only what comes from outside."""
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            made.reads.add(node.id)
        elif own:
            made.assigned[node.id] = None
        return
    if isinstance(node, ast.Constant):
        return
    if isinstance(node, refused):
        made.refused = made.refused or node
    if isinstance(node, ast.Lambda):
        inner = Facts()
        _expression(node.body, inner, refused)
        made.captured |= inner.reads - _parameters(node.args)
        made.reads |= made.captured
        made.refused = made.refused or inner.refused
        return
    if isinstance(node, ast.alias):
        made.assigned[(node.asname or node.name).partition(".")[0]] = None
    own = own and not isinstance(node, _COMPREHENSIONS)
    for child in _children(node):
        _expression(child, made, refused, own)


def _children(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for name in node._fields:
        child = getattr(node, name, None)
        if isinstance(child, ast.AST):
            if not isinstance(child, ast.expr_context | ast.operator | ast.cmpop):
                found.append(child)
        elif isinstance(child, list):
            found += [c for c in child if isinstance(c, ast.AST)]
    return found


def _parameters(args: ast.arguments) -> set[str]:
    listed = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {param.arg for param in listed if param is not None}


class Liveness:
    """The names to merge at each `if` and loop of one function."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._merged: dict[ast.AST, list[str]] = {}
        self._outlives: dict[ast.AST, set[str]] = {}
        self._loops: list[set[str]] = []
        whole = combined(function.body)
        self._order = {name: place for place, name in enumerate(whole.assigned)}
        self._always = whole.captured
        self._block(function.body, set(self._always))

    def merged(self, node: ast.If | ast.While | ast.For) -> list[str]:
        """Names whose values may differ after `node`, or in the next round of it, and may be read."""
        return self._merged[node]

    def outlives(self, node: ast.For) -> set[str]:
        """Names of loop variables that are read after the loop."""
        return self._outlives[node]

    def _note(self, node: ast.stmt, body: Sequence[ast.stmt], live: set[str]) -> None:
        names = combined(body).assigned.keys() & live
        self._merged[node] = sorted(names, key=self._order.__getitem__)

    def _block(self, body: Sequence[ast.stmt], live: set[str]) -> set[str]:
        for statement in reversed(body):
            live = self._before(statement, live)
        return live | self._always

    def _before(self, s: ast.stmt, live: set[str]) -> set[str]:
        """What is live before a statement, if `live` is after it."""
        match s:
            case ast.If():
                self._note(s, [*s.body, *s.orelse], live)
                return _reads(s.test) | self._block(s.body, live) | self._block(s.orelse, live)
            case ast.While():
                return self._loop(s, live, _reads(s.test), set())
            case ast.For():
                return _reads(s.iter) | self._loop(s, live, set(), _targets(s.target))
            case ast.With():
                inner, targets = self._block(s.body, live), set()
                for item in s.items:
                    inner |= _reads(item.context_expr)
                    targets |= _targets(item.optional_vars) if item.optional_vars else set()
                return inner - targets
            case ast.Return() | ast.Raise():
                return facts(s).reads
            case ast.Break() | ast.Continue():
                return live | (self._loops[-1] if self._loops else set())
            case ast.Assign() | ast.AnnAssign() | ast.FunctionDef():
                return (live - facts(s).assigned.keys()) | facts(s).reads
        return live | facts(s).reads

    def _loop(self, s: ast.While | ast.For, after: set[str], test: set[str], targets: set[str]) -> set[str]:
        header = after | test
        self._loops.append(header)
        while True:
            self._loops[-1] = header
            wider = header | (self._block(s.body, header) - targets)
            if wider == header:
                break
            header = wider
        self._loops.pop()
        self._note(s, s.body, header)
        self._merged[s] = [name for name in self._merged[s] if name not in targets]
        self._outlives[s] = (targets & after) - self._always
        return header


def _reads(node: ast.AST) -> set[str]:
    made = Facts()
    _expression(node, made, ())
    return made.reads


def _targets(node: ast.AST) -> set[str]:
    made = Facts()
    _expression(node, made, ())
    return set(made.assigned)
