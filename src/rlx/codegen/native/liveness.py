"""Which names a native function may still read, at each `if` and loop: only these need a phi.

The analysis walks statements backwards. `merged` of an `if` are the names that a side assigns and that may be
read afterwards; `merged` of a loop are those that its body assigns and that its next round, or what follows
it, may read. Names come in the order of their first assignment, so that the emitted code is always the same.

>>> tree = ast.parse("def f(n):\\n t = 0\\n while t < n:\\n  u = t\\n  t = u + 1\\n return t")
>>> loop = tree.body[0].body[1]
>>> Liveness(tree.body[0]).merged(loop)
['t']
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

Scope = ast.FunctionDef | ast.Lambda
_INNER = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def assigned(nodes: Iterable[ast.AST]) -> list[str]:
    """Names that statements bind in their own scope, in the order of their first assignment."""
    found: dict[str, None] = {}
    for node in nodes:
        for inner in _own(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found[inner.id] = None
            elif isinstance(inner, ast.FunctionDef):
                found[inner.name] = None
            elif isinstance(inner, ast.alias):
                found[(inner.asname or inner.name).partition(".")[0]] = None
    return list(found)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is under it, in source order, without the insides of nested functions."""
    yield node
    if not isinstance(node, _INNER):
        # The value of an assignment comes before its targets: it runs first.
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            children = [node.value, *node.targets]
        for child in children:
            yield from _own(child)


def reads(*nodes: ast.AST | None) -> set[str]:
    """Names that expressions read, those in nested functions and comprehensions included."""
    return {
        inner.id
        for node in nodes
        if node is not None
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load)
    }


class Liveness:
    """The names to merge at each `if` and loop of one function."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._merged: dict[ast.AST, list[str]] = {}
        self._order = {name: place for place, name in enumerate(assigned(function.body))}
        self._loops: list[set[str]] = []
        # A nested function may be called anywhere: what it reads is always live.
        nested = [n for n in ast.walk(function) if isinstance(n, Scope) and n is not function]
        self._always = set().union(*map(_captured, nested))
        self._outlives: dict[ast.AST, set[str]] = {}
        self._block(function.body, set(self._always))

    def merged(self, node: ast.If | ast.While | ast.For) -> list[str]:
        """Names whose values may differ after `node`, or in the next round of it, and may be read."""
        return self._merged[node]

    def outlives(self, node: ast.For) -> set[str]:
        """Names of loop variables that are read after the loop."""
        return self._outlives[node]

    def _note(self, node: ast.AST, bodies: Sequence[Sequence[ast.stmt]], live: set[str]) -> None:
        names = {name for body in bodies for name in assigned(body)} & live
        self._merged[node] = sorted(names, key=self._order.__getitem__)

    def _block(self, body: Sequence[ast.stmt], live: set[str]) -> set[str]:
        for statement in reversed(body):
            live = self._before(statement, live)
        return live | self._always

    def _before(self, s: ast.stmt, live: set[str]) -> set[str]:
        """What is live before a statement, if `live` is after it."""
        match s:
            case ast.If():
                self._note(s, (s.body, s.orelse), live)
                return reads(s.test) | self._block(s.body, live) | self._block(s.orelse, live)
            case ast.While():
                return self._loop(s, live, reads(s.test), set())
            case ast.For():
                return reads(s.iter) | self._loop(s, live, set(), set(assigned([s.target])))
            case ast.With():
                inner = self._block(s.body, live)
                targets = [i.optional_vars for i in s.items if i.optional_vars is not None]
                return (inner - set(assigned(targets))) | reads(*(i.context_expr for i in s.items))
            case ast.Return() | ast.Raise():
                return reads(s)
            case ast.Break() | ast.Continue():
                return live | (self._loops[-1] if self._loops else set())
            case ast.Assign(targets=targets):
                plain = {t.id for t in targets if isinstance(t, ast.Name)} | _unpacked(targets)
                return (live - plain) | reads(s)
            case ast.AugAssign(target=target):
                return live | reads(s) | ({target.id} if isinstance(target, ast.Name) else set())
            case ast.AnnAssign(target=ast.Name(id=name)) if s.value is not None:
                return (live - {name}) | reads(s.value)
            case ast.FunctionDef():
                return (live - {s.name}) | _captured(s)
        return live | reads(s)

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
        self._note(s, (s.body,), header)
        self._outlives[s] = (targets & after) - self._always
        self._merged[s] = [name for name in self._merged[s] if name not in targets]
        return header


def _captured(scope: Scope) -> set[str]:
    """Names of the function around it that a nested function reads."""
    args = scope.args
    params = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    body = scope.body if isinstance(scope, ast.FunctionDef) else [scope.body]
    own = {param.arg for param in params if param is not None} | set(assigned(body))
    return (reads(*body) - own) | reads(*args.defaults, *args.kw_defaults)


def _unpacked(targets: Sequence[ast.expr]) -> set[str]:
    """Names in tuples of targets."""
    return {name for t in targets if isinstance(t, ast.Tuple | ast.List) for name in assigned([t])}
