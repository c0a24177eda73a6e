"""From the source of a native function to Python code that writes it: the rewriting behind `@native`.

`compiled(function, ...)` parses a function once and gives another one. Its operators are calls of
`operators.py`, which emit an instruction where an operand is a `Value` and compute where none is. The two
sides of an `if` and the bodies of loops become small nested functions, so that `control.py` can run them
where the builder needs them; names that they assign are shared by `nonlocal`. Line numbers stay those of the
file, so a traceback shows the line that was written.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Sequence
from functools import partial

from rlx.codegen.native import control, operators
from rlx.codegen.native.control import EXPANDED
from rlx.codegen.native.liveness import Liveness, combined, facts, forget
from rlx.errors import CompileError

BUILDER = ".f"  # the parameter that is the function under construction; no name in a source can clash with it

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "bit_and",
    ast.BitOr: "bit_or",
    ast.BitXor: "bit_xor",
    ast.LShift: "shift_left",
    ast.RShift: "shift_right",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Not: "not_",
    ast.USub: "neg",
    ast.Invert: "invert",
}
_BUILTINS = {"min": "minimum", "max": "maximum"}
_REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "a native function has no exceptions",
    ast.Delete: "names cannot be deleted",
    ast.ClassDef: "classes are defined outside",
    ast.Global: "a native function cannot assign names of its module",
    ast.Nonlocal: "a nested function cannot assign names of the outer one; return the value",
    ast.Match: "use if and elif",
    ast.NamedExpr: "assign in a statement of its own",
    ast.Yield: "a native function cannot be a generator",
    ast.YieldFrom: "a native function cannot be a generator",
    ast.Await: "a native function cannot be asynchronous",
    ast.AsyncFor: "a native function cannot be asynchronous",
    ast.AsyncWith: "a native function cannot be asynchronous",
    ast.AsyncFunctionDef: "a native function cannot be asynchronous",
}
_REFUSED_TYPES = tuple(_REFUSED)


def source_tree(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, with the line numbers of its file."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    first, last = code.co_firstlineno, _last_line(code)
    if not lines:
        raise CompileError(
            f"{function.__qualname__}: the source is not available; put native functions into a file"
        )
    above = "\n" * (first - 1)  # keeps the line numbers
    tree = ast.parse(above + textwrap.dedent("".join(lines[first - 1 : last])))
    node = tree.body[0] if tree.body else None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__name__:
        raise CompileError(
            f"{code.co_filename}:{first}: there is no function {function.__name__!r} here; "
            "the file has changed since it was imported"
        )
    return node


def _last_line(code: types.CodeType) -> int:
    ends = [end for _, end, column, _ in code.co_positions() if end and column is not None]
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    if not ends:  # Python was started with -X no_debug_ranges: slower
        lines, first = inspect.getsourcelines(code)
        return first + len(lines) - 1
    return max([code.co_firstlineno, *ends, *inner])


def compiled(function: types.FunctionType, is_native: bool, marks: bool) -> Callable[..., object]:
    """The function that writes what `function` says. Its first argument is the builder.

    A native function returns by an instruction. One that is expanded where it is called (not `is_native`)
    gives a value. With `marks`, each statement first notes its line in the emitted text.
    """
    node = source_tree(function)
    rewriter = _Rewriter(function, node, is_native, marks)
    outer = ast.parse("def factory(): pass")
    made = outer.body[0]
    assert isinstance(made, ast.FunctionDef)
    rewritten = rewriter.rewritten()
    rewritten.name = "." + node.name  # inside, its name means what it means outside: `load` may call `load`
    made.body = [rewritten]
    given = dict.fromkeys((*rewriter.used, *function.__code__.co_freevars))
    made.args.args = [ast.arg(name) for name in given]
    code = compile(ast.fix_missing_locations(outer), function.__code__.co_filename, "exec")
    inner = _find(_find(code, "factory"), rewritten.name).replace(co_name=node.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    # By its own name, a function calls what its module calls so: itself, or for a method another one.
    given_now = {**rewriter.used, node.name: function.__globals__.get(node.name)}
    closure = [cells.get(name) or _cell(given_now.get(name)) for name in inner.co_freevars]
    result = types.FunctionType(inner, function.__globals__, node.name, function.__defaults__, tuple(closure))
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _cell(held: object) -> types.CellType:
    """A variable of generated code. What another function is compiled to is made when it is first called."""
    if not isinstance(held, _Expansion):
        return types.CellType(held)

    def first(*args: object, **options: object) -> object:
        code = cell.cell_contents = held.code()
        return code(*args, **options)

    cell = types.CellType(first)
    return cell


class _Expansion:
    """A function to be expanded, as code that writes it: called with the builder, without a search for it."""

    def __init__(self, code: Callable[[bool], Callable[..., object]], marks: bool) -> None:
        self.code = partial(code, marks)


def _find(code: types.CodeType, name: str) -> types.CodeType:
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


class _Rewriter(ast.NodeTransformer):
    """Rewrites one function; nested functions get a rewriter of their own."""

    def __init__(
        self,
        function: types.FunctionType,
        node: ast.FunctionDef,
        is_native: bool,
        marks: bool,
        outer: _Rewriter | None = None,
    ) -> None:
        self.function, self.node, self.outer = function, node, outer
        self.is_native, self.marks = is_native, marks
        self.used: dict[str, object] = outer.used if outer else {}  # helpers, by the names that code uses
        params = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        params += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        self.params = [param.arg for param in params]
        known = facts(node, _REFUSED_TYPES)
        if known.refused is not None:
            self._refuse(known.refused, _REFUSED[type(known.refused)])
        if not is_native:
            node.body = self._with_tail_returns(node.body)
        self.names = [name for name in combined(node.body).assigned if name not in self.params]
        # What `emit` was given, and what these objects hold, is known.
        only_known = [arg.arg for arg in node.args.kwonlyargs] if is_native else []
        self.given = {name for name in only_known if name not in combined(node.body).assigned}
        self.liveness = Liveness(node)
        self.depth = 0  # how many nested functions of our own making are around
        self.count = 0

    # ---- the function as a whole

    def rewritten(self) -> ast.FunctionDef:
        node = self.node
        made = self.block(node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body)
        start: list[ast.stmt] = []
        if self.names:
            # Never runs: makes every name a local of this function, which nested functions share.
            targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in self.names]
            start.append(ast.If(ast.Constant(False), [ast.Assign(targets, ast.Constant(None))], []))
        args = _without_annotations(node.args, self)
        if self.outer is None:
            args.posonlyargs.insert(0, ast.arg(BUILDER))
        result = ast.FunctionDef(node.name, args, [*start, *made] or [ast.Pass()], [])
        return ast.copy_location(result, node)

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in body:
            if self.marks and not isinstance(statement, ast.FunctionDef):
                mark = self._helper_call("mark", _builder(), ast.Constant(self._noted(statement.lineno)))
                out.append(ast.copy_location(ast.Expr(mark), statement))
            made = self.visit(statement)
            for new in made if isinstance(made, list) else [made]:
                # Only nodes without a place of their own take this one.
                out.append(ast.copy_location(new, statement))
        return out

    def _noted(self, line: int) -> str:
        """A line of the source as comments show it: `pool.py:70  count += 1`."""
        path = self.function.__code__.co_filename
        return f"{path.rpartition('/')[2]}:{line}  {linecache.getline(path, line).strip()}"

    def _refuse(self, node: ast.AST, why: str) -> None:
        path, line = self.function.__code__.co_filename, getattr(node, "lineno", self.node.lineno)
        text = linecache.getline(path, line).strip()
        raise CompileError(f"{path}:{line}: in {self.node.name}: {why}\n    {text}")

    # ---- names and calls of helpers

    def _name(self, name: str) -> ast.Name:
        """A function of `operators` or `control`."""
        self.used["." + name] = getattr(operators, name, None) or getattr(control, name)
        return ast.Name("." + name, ast.Load())

    def _helper_call(self, name: str, *args: ast.expr) -> ast.Call:
        return ast.Call(self._name(name), list(args), [])

    def _fresh(self, prefix: str) -> str:
        self.count += 1
        return f".{prefix}{self.count}"

    def _is_local(self, name: str) -> bool:
        known = name in self.params or name in self.names or name in self.function.__code__.co_freevars
        return known or (self.outer is not None and self.outer._is_local(name))

    def _is_known(self, test: ast.expr) -> bool:
        """Whether a test asks about Python objects: then Python decides, while the code is written."""
        if isinstance(test, ast.BoolOp):
            return all(map(self._is_known, test.values))
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not) and self._is_known(test.operand)
        if isinstance(test, ast.Call):
            return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
        if isinstance(test, ast.Compare):
            return type(test.ops[0]) not in _OPERATORS
        while isinstance(test, ast.Attribute):
            test = test.value
        return isinstance(test, ast.Name) and test.id in self.given

    def _global(self, name: str) -> object:
        """What a global name stands for, or None."""
        if self._is_local(name):
            return None
        return self.function.__globals__.get(name, getattr(builtins, name, None))

    # ---- expressions

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if type(node.op) not in _OPERATORS:
            return node  # ** and @: known now
        return self._located(node, _OPERATORS[type(node.op)], node.left, node.right)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        if self._is_known(node):
            return self.generic_visit(node)  # type: ignore[return-value]
        self.generic_visit(node)
        if isinstance(node.operand, ast.Constant) or type(node.op) not in _OPERATORS:
            return node
        return self._located(node, _OPERATORS[type(node.op)], node.operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if any(type(op) not in _OPERATORS for op in node.ops):
            return node  # is, in: known now
        if len(node.ops) > 1:
            self._refuse(node, "write two comparisons, joined by &")
        return self._located(node, _OPERATORS[type(node.ops[0])], node.left, node.comparators[0])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        if self._is_known(node):
            return self.generic_visit(node)  # type: ignore[return-value]
        self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        result = node.values[-1]
        for value in reversed(node.values[:-1]):
            result = self._located(node, name, value, _thunk(result))
        return result

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        parts = (node.test, _thunk(node.body), _thunk(node.orelse))
        return node if self._is_known(node.test) else self._located(node, "choose", *parts)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Slice) or not isinstance(node.ctx, ast.Load):
            return node
        return self._located(node, "item", node.value, node.slice)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            meant = self._global(node.func.id)
            if isinstance(meant, control.Instruction):
                # Straight to the builder: the call costs what it costs without the notation.
                node.func = ast.copy_location(ast.Attribute(_builder(), meant.method, ast.Load()), node.func)
            elif isinstance(meant, types.FunctionType) and EXPANDED in vars(meant):
                name = f".{node.func.id}()"
                self.used[name] = _Expansion(vars(meant)[EXPANDED], self.marks)
                node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
                node.args.insert(0, _builder())
            elif node.func.id in _BUILTINS and meant is getattr(builtins, node.func.id):
                return self._located(node, _BUILTINS[node.func.id], *node.args)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        self.generic_visit(node)
        node.ifs = [self._located(test, "known", test) for test in node.ifs]
        return node

    def _located(self, at: ast.expr, name: str, *args: ast.expr) -> ast.expr:
        return ast.copy_location(self._helper_call(name, _builder(), *args), at)

    # ---- statements

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | list[ast.stmt]:
        if node.value is None:
            return []
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
            return self._store(node.targets[0], self.visit(node.value))
        self.generic_visit(node)
        return node

    def _store(self, target: ast.Subscript, value: ast.expr) -> ast.stmt:
        held, index = self.visit(target.value), self.visit(target.slice)
        return ast.Expr(self._helper_call("set_item", _builder(), held, index, value))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt | list[ast.stmt]:
        value = self.visit(node.value)
        name = _OPERATORS[type(node.op)]
        if isinstance(node.target, ast.Name):
            old: ast.expr = ast.Name(node.target.id, ast.Load())
            return ast.Assign([node.target], self._located(node.value, name, old, value))
        if isinstance(node.target, ast.Subscript):
            call = self._helper_call("update_item", _builder(), self._name(name))
            call.args += [self.visit(node.target.value), self.visit(node.target.slice), value]
            return ast.Expr(call)
        held = self._fresh("held")
        self.generic_visit(node.target)
        assert isinstance(node.target, ast.Attribute)
        old = ast.Attribute(ast.Name(held, ast.Load()), node.target.attr, ast.Load())
        new = ast.Attribute(ast.Name(held, ast.Load()), node.target.attr, ast.Store())
        return [
            _assign(held, node.target.value),
            ast.Assign([new], self._located(node.value, name, old, value)),
        ]

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        node.test = self._located(node.test, "known", node.test)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        value = node.value or ast.Constant(None)
        if self.is_native:
            return ast.Return(self._helper_call("return_", _builder(), value))
        return ast.Return(self._helper_call("Returned", value) if self.depth else value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        if node.decorator_list:
            self._refuse(node, "a nested function cannot be decorated")
        return _Rewriter(self.function, node, False, self.marks, self).rewritten()

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt]:
        test = self.visit(node.test)
        if facts(node).leaving is not None or self._is_known(node.test):
            node.test = test if self._is_known(node.test) else self._located(node.test, "known", test)
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return node
        then = self._part("then", node.body)
        parts: list[ast.stmt] = [then]
        otherwise: ast.expr = ast.Constant(None)
        if node.orelse:
            part = self._part("else", node.orelse)
            parts.append(part)
            otherwise = ast.Name(part.name, ast.Load())
        shared, accessors = self._accessors(self.liveness.merged(node))
        call = self._helper_call("if_", _builder(), test, ast.Name(then.name, ast.Load()), otherwise)
        call.args += accessors
        return [*parts, *shared, *self._run(call, [*node.body, *node.orelse])]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        self._check_loop(node)
        test = ast.copy_location(_thunk(self.visit(node.test)), node.test)
        body = self._part("body", node.body)
        shared, accessors = self._accessors(self.liveness.merged(node))
        call = self._helper_call("while_", _builder(), test, ast.Name(body.name, ast.Load()))
        call.args += accessors
        return [body, *shared, *self._run(call, node.body)]

    def visit_For(self, node: ast.For) -> ast.stmt | list[ast.stmt]:
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        meant = self._global(called.id) if isinstance(called, ast.Name) else None
        if meant is not range and meant is not control.loop:
            return self._unrolled(node)
        assert isinstance(node.iter, ast.Call)
        self._check_loop(node)
        for name in self.liveness.outlives(node):
            self._refuse(node, f"{name!r} has no value after this loop, but is read there")
        bounds: list[ast.expr] = [self.visit(argument) for argument in node.iter.args]
        body = self._part("body", node.body, node.target)
        shared, accessors = self._accessors(self.liveness.merged(node))
        kind = ast.Constant(meant is range)
        call = self._helper_call("for_", _builder(), kind, ast.Tuple(bounds, ast.Load()))
        call.args += [ast.Name(body.name, ast.Load()), *accessors]
        return [body, *shared, *self._run(call, node.body)]

    def _unrolled(self, node: ast.For) -> ast.stmt:
        if node.orelse:
            self._refuse(node, "a loop has no else")
        node.iter = self._located(node.iter, "iterable", self.visit(node.iter))
        node.target = self.visit(node.target)
        node.body = self.block(node.body)
        return node

    def _check_loop(self, node: ast.While | ast.For) -> None:
        if node.orelse:
            self._refuse(node, "a loop has no else")
        if (found := combined(node.body).leaving) is not None:
            self._refuse(found, "a loop at run time ends by its test; carry a flag in a variable")

    def _part(self, prefix: str, body: Sequence[ast.stmt], target: ast.expr | None = None) -> ast.FunctionDef:
        """A nested function that runs `body`, and assigns its argument to `target`."""
        self.depth += 1
        inner: list[ast.stmt] = self.block(body)
        self.depth -= 1
        names = list(combined(body).assigned)
        args, first = [], []
        if target is not None:
            names = list(dict.fromkeys([*_names(target), *names]))
            args, first = [ast.arg(".i")], [ast.Assign([target], ast.Name(".i", ast.Load()))]
        declared: list[ast.stmt] = [ast.Nonlocal(names)] if names else []
        made = ast.FunctionDef(self._fresh(prefix), _arguments(args), [*declared, *first, *inner], [])
        return ast.copy_location(made, body[0])

    def _accessors(self, names: list[str]) -> tuple[list[ast.stmt], list[ast.expr]]:
        """Functions that read and write the names that both ways through a branch share."""
        if not names:
            return [], []
        get, put = self._fresh("get"), self._fresh("put")
        shared: ast.stmt = ast.Nonlocal(names)
        held: ast.expr = ast.List([ast.Name(name, ast.Load()) for name in names], ast.Load())
        slow = self._helper_call("bound", self._helper_call("locals_"), *map(ast.Constant, names))
        missing = ast.ExceptHandler(self._name("NameError_"), None, [ast.Return(slow)])
        snapshot = ast.Try([ast.Return(held)], [missing], [], [])
        targets = ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())
        sets: list[ast.stmt] = [shared, ast.Assign([targets], ast.Name(".values", ast.Load()))]
        for name in names:
            test = ast.Compare(ast.Name(name, ast.Load()), [ast.Is()], [self._name("UNSET")])
            sets.append(ast.If(test, [ast.Delete([ast.Name(name, ast.Del())])], []))
        parts: list[ast.stmt] = [
            ast.FunctionDef(get, _arguments([]), [shared, snapshot], []),
            ast.FunctionDef(put, _arguments([ast.arg(".values")]), sets, []),
        ]
        listed: ast.expr = ast.Tuple([ast.Constant(name) for name in names], ast.Load())
        return parts, [listed, ast.Name(get, ast.Load()), ast.Name(put, ast.Load())]

    def _run(self, call: ast.Call, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Call what runs a branch or loop; if its parts may return, return what they do."""
        if not combined(body).returns:
            return [ast.Expr(call)]
        result = self._fresh("result")
        held: ast.expr = ast.Name(result, ast.Load())
        test = ast.Compare(held, [ast.IsNot()], [ast.Constant(None)])
        if not (self.is_native or self.depth):
            held = ast.Attribute(held, "value", ast.Load())
        return [_assign(result, call), ast.If(test, [ast.Return(held)], [])]

    # ---- returns of functions that are expanded where they are called

    def _with_tail_returns(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The same statements, with what follows a side that returns moved into the other side."""
        for place, statement in enumerate(body):
            if not isinstance(statement, ast.If) or not facts(statement).returns:
                continue
            rest = body[place + 1 :]
            if _always_returns(statement.body):
                statement.orelse = [*statement.orelse, *rest]
            elif _always_returns(statement.orelse):
                statement.body = [*statement.body, *rest]
            else:
                continue  # right if the test is known; `if_` refuses it at run time
            statement.body = self._with_tail_returns(statement.body)
            statement.orelse = self._with_tail_returns(statement.orelse)
            forget(statement)
            return [*body[:place], statement]
        return body


# ---- pieces of syntax


def _builder() -> ast.expr:
    return ast.Name(BUILDER, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def _arguments(args: list[ast.arg]) -> ast.arguments:
    return ast.arguments(posonlyargs=[], args=args, kwonlyargs=[], kw_defaults=[], defaults=[])


def _thunk(body: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Lambda(_arguments([]), body), body)


def _without_annotations(args: ast.arguments, rewriter: _Rewriter) -> ast.arguments:
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    if rewriter.outer is None:  # the defaults of the function itself are known already
        none: list[ast.expr] = [ast.Constant(None) for _ in args.defaults]
        args.defaults, args.kw_defaults = none, [d and ast.Constant(None) for d in args.kw_defaults]
    else:
        args.defaults = [rewriter.outer.visit(default) for default in args.defaults]
        args.kw_defaults = [d and rewriter.outer.visit(d) for d in args.kw_defaults]
    return args


def _always_returns(body: Sequence[ast.stmt]) -> bool:
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.If):
        return _always_returns(last.body) and _always_returns(last.orelse)
    return isinstance(last, ast.Return | ast.Raise)


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]
