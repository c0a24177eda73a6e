"""What the code of `@native` functions calls: branches and loops that fold what is known.

Each function takes the builder `f` first. Where the test or all bounds are known, it does what Python does.
`syntax.py` writes the calls; nobody else needs them, except for `current`, `Instruction` and `loop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

from rlx.codegen.native.irops import Int, Number
from rlx.codegen.native.irtext import Function, Value
from rlx.codegen.native.operators import number, truth
from rlx.errors import CompileError

locals_ = locals  # called by generated code, to read the names that are bound


class Returned:
    """What a part of a function gives when it has returned; a part that goes on gives None."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Unset:
    """Stands for a name without a value."""


UNSET = _Unset()
Part = Callable[[], Returned | None]
Names = tuple[str, ...]
Get = Callable[[], dict[str, object]]
Put = Callable[[Sequence[object]], None]


# ---- the function under construction


class _State(threading.local):
    function: Function | None = None


_state = _State()


def current() -> Function:
    """The function that is being written."""
    if _state.function is None:
        raise CompileError("no native function is being written here; call this inside an @native function")
    return _state.function


def enter(f: Function | None) -> Function | None:
    """Make `f` the function that is being written; gives the one before."""
    before, _state.function = _state.function, f
    return before


class Instruction:
    """A method of the builder as a function: `load(i64, p)` stands for `f.load("i64", p)`.

    In a native function, `syntax.py` replaces a call by that of the method. This object is for other uses.
    """

    def __init__(self, method: str) -> None:
        self.method = method

    def __call__(self, *args: object, **options: object) -> object:
        return getattr(current(), self.method)(*args, **options)

    def __repr__(self) -> str:
        return f"Instruction({self.method!r})"


def mark(f: Function, file: str, line: int) -> None:
    """Note in the emitted text which line of Python wrote what follows."""
    if not f.ended:
        f.comment(f"{file}:{line}")


# ---- branches and loops


def _condition(f: Function, x: object) -> Value:
    """A condition as a truth value, also where it is known now."""
    return truth(x) if x.__class__ is Value else f.value(x if isinstance(x, float) else bool(x), "i1")


def both(f: Function, first: object, second: Callable[[], object]) -> object:
    """`first and second`: the second is computed only where the first holds."""
    if first.__class__ is not Value:
        return first and second()
    return f.if_value(truth(first), lambda: [_condition(f, second())], lambda: [f.value(False, "i1")])[0]


def either(f: Function, first: object, second: Callable[[], object]) -> object:
    """`first or second`: the second is computed only where the first does not hold."""
    if first.__class__ is not Value:
        return first or second()
    return f.if_value(truth(first), lambda: [f.value(True, "i1")], lambda: [_condition(f, second())])[0]


def choose(f: Function, test: object, then: Callable[[], object], otherwise: Callable[[], object]) -> object:
    """`then if test else otherwise`: one of the two is computed."""
    if test.__class__ is not Value:
        return then() if test else otherwise()
    fork = f.fork(truth(test))
    f.regions += 1
    first = then()
    fork.otherwise()
    second = otherwise()
    f.regions -= 1
    fork.close()
    return _merge(fork.phi, f, "the value of this expression", first, second)


def return_(f: Function, x: object) -> Returned:
    """Return from a native function."""
    if (x is None) != (f.returns == "void"):
        raise CompileError(f"{f.name} returns {f.returns}, but this returns {'nothing' if x is None else x}")
    value = None if x is None else f.value(number(x), f.returns)
    if value is not None and value.type != f.returns:
        raise CompileError(f"{f.name} returns {f.returns}, but this is {value.type}")
    f.return_(value)
    return Returned(None)


def if_(
    f: Function,
    test: object,
    then: Part,
    otherwise: Part | None,
    names: Names = (),
    get: Get = dict,
    put: Put = lambda _: None,
) -> Returned | None:
    """Run one side if the test is known, else write both and merge the names that they assign."""
    if test.__class__ is not Value:
        if test:
            return then()
        return otherwise() if otherwise is not None else None
    before = get() if names else {}
    truth(test)
    fork = f.fork(test)
    f.regions += 1
    first, left, first_ended = then(), get() if names else before, f.ended
    second, right, second_ended = None, before, False
    if otherwise is not None:
        fork.otherwise()
        if names:
            put([before.get(name, UNSET) for name in names])
        second, right, second_ended = otherwise(), get() if names else before, f.ended
    elif not first_ended and any(n in before and not _equal(left.get(n, UNSET), before[n]) for n in names):
        fork.otherwise()
    f.regions -= 1
    if not fork.close():
        return Returned(None)
    if first_ended or second_ended:
        goes_on, result = (right, second) if first_ended else (left, first)
        if names:
            put([goes_on.get(name, UNSET) for name in names])
        return result
    if names:
        put([_merge(fork.phi, f, repr(n), left.get(n, UNSET), right.get(n, UNSET)) for n in names])
    if (first is None) != (second is None):
        raise CompileError(
            "only one side of this run-time `if` returns; a function that is expanded needs both to"
        )
    if first is None or second is None:
        return None
    return Returned(_merge(fork.phi, f, "the returned value", first.value, second.value))


def _merge(phi: Callable[[Value, Value], Value], f: Function, what: str, a: object, b: object) -> object:
    """One value for what two sides have assigned. UNSET if Python cannot tell which object it is."""
    if _equal(a, b):
        return a
    if isinstance(a, list | tuple) and a.__class__ is b.__class__ and len(a) == len(b):
        return a.__class__([_merge(phi, f, what, x, y) for x, y in zip(a, b, strict=True)])
    if not (_is_leaf(a) and _is_leaf(b)):
        return UNSET
    type_ = next((x.type for x in (a, b) if x.__class__ is Value), _type_of(what, a))
    first, second = f.value(a, type_), f.value(b, type_)
    if first.type != second.type:
        raise CompileError(f"{what} is {first.type} on one side of this `if` and {second.type} on the other")
    return phi(first, second)


def _equal(a: object, b: object) -> bool:
    """Whether two values are surely the same, so that no phi is needed."""
    if a is b:
        return True
    if a.__class__ is not b.__class__:
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)  # 0.0 and -0.0 differ
    return isinstance(a, Value | int | str) and bool(a == b)


def _is_leaf(x: object) -> TypeGuard[Number]:
    return x.__class__ is Value or isinstance(x, int | float)


def _type_of(what: str, x: object) -> str:
    """The type of a Python number that becomes known at run time only."""
    if isinstance(x, float):
        raise CompileError(f"{what} needs a type: write float32({x!r}) or float64({x!r})")
    return "i1" if isinstance(x, bool) else "i64"


def _leaves(x: object) -> list[Number]:
    """The numbers and Values of nested lists; nothing else is carried through a loop."""
    if isinstance(x, list | tuple):
        return [leaf for inner in x for leaf in _leaves(inner)]
    return [x] if _is_leaf(x) else []


def _rebuilt(x: object, leaves: Iterator[Value]) -> object:
    if isinstance(x, list | tuple):
        return x.__class__([_rebuilt(inner, leaves) for inner in x])
    return next(leaves) if _is_leaf(x) else x


def _round(f: Function, body: Callable[..., Returned | None], *index: Int) -> None:
    """Write the body of a loop."""
    f.regions += 1
    result = body(*index)
    f.regions -= 1
    if f.ended or result is not None:
        raise CompileError("a loop at run time cannot return in every round; return under an `if`")


class _Carried:
    """The names that a loop changes, as the values that it carries from round to round."""

    def __init__(self, f: Function, names: Names, get: Get, put: Put) -> None:
        self.f, self.names, self.get, self.put = f, names, get, put
        before = get()
        self.before = [before.get(name, UNSET) for name in names]
        values = [held for held in self.before if isinstance(held, Value)]
        self.plain = len(values) == len(names)
        self.start = values if self.plain else list(self._first())

    def _first(self) -> Iterator[Value]:
        for name, held in zip(self.names, self.before, strict=True):
            for leaf in _leaves(held):
                yield leaf if leaf.__class__ is Value else self.f.value(leaf, _type_of(repr(name), leaf))

    def unpack(self, values: Sequence[Value]) -> None:
        """Give the names these values."""
        leaves = iter(values)
        self.put(values if self.plain else [_rebuilt(held, leaves) for held in self.before])

    def round(self, body: Callable[..., Returned | None], *index: Int) -> list[Value]:
        """Write the body; the values at its end."""
        _round(self.f, body, *index)
        after = self.get()
        out: list[Value] = []
        for name, held in zip(self.names, self.before, strict=True):
            found = after.get(name, UNSET)
            if isinstance(found, Value) and isinstance(held, Value) and found.type == held.type:
                out.append(found)
            else:
                out += self._checked(name, held, found)
        return out

    def _checked(self, name: str, before: object, after: object) -> list[Value]:
        """The leaves of `after`, which must be built like `before`."""
        if isinstance(before, list | tuple):
            if before.__class__ is not after.__class__ or len(before) != len(after):
                raise CompileError(f"{name!r} changes its length or kind in a loop at run time")
            pairs = zip(before, after, strict=True)
            return [leaf for one, other in pairs for leaf in self._checked(name, one, other)]
        if not _is_leaf(before):
            if before is not UNSET and before is not after:
                raise CompileError(f"{name!r} is a Python object; a loop at run time cannot change it")
            return []
        if not _is_leaf(after):
            raise CompileError(f"{name!r} is a number before this loop, but not after a round")
        type_ = before.type if before.__class__ is Value else _type_of(repr(name), before)
        value = self.f.value(after, type_)
        if value.type != type_:
            raise CompileError(f"{name!r} is {type_} before this loop, but {value.type} after a round")
        return [value]


def while_(
    f: Function,
    test: Callable[[], object],
    body: Part,
    names: Names = (),
    get: Get = dict,
    put: Put = lambda _: None,
) -> None:
    """Write a loop that tests first. It runs at run time, whatever is known about its test now."""
    carried = _Carried(f, names, get, put)

    def holds(values: list[Value]) -> Value:
        carried.unpack(values)
        return _condition(f, test())

    carried.unpack(f.while_loop(carried.start, holds, lambda _: carried.round(body)))


def for_(
    f: Function,
    unrolls: bool,
    bounds: tuple[Int, ...],
    body: Callable[[Int], Returned | None],
    names: Names = (),
    get: Get = dict,
    put: Put = lambda _: None,
) -> Returned | None:
    """`for i in range(...)`: Python repeats the body if it knows all bounds, else a loop does at run time.

    `for i in loop(...)` is a loop at run time always (`unrolls` is off).
    """
    numbers = [bound for bound in bounds if not isinstance(bound, Value)]
    if unrolls and len(numbers) == len(bounds):
        for i in range(*numbers):
            result = body(i)
            if result is not None:
                return result
        return None
    lo, hi, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not isinstance(step, Value) and step <= 0:
        raise CompileError(f"the step of a loop at run time must be positive, not {step}")
    if not names:
        f.loop(lo, hi, step, (), lambda i, _: _round(f, body, i))
        return None
    carried = _Carried(f, names, get, put)

    def once(i: Int, values: list[Value]) -> list[Value]:
        carried.unpack(values)
        return carried.round(body, i)

    carried.unpack(f.loop(lo, hi, step, carried.start, once))
    return None


def loop(*bounds: Int) -> Iterator[Int]:
    """Like `range`, but never repeated by Python: `for i in loop(0, 64, 16)` is always a loop at run time."""
    raise CompileError("loop(...) is only for the head of a `for` in a native function")
