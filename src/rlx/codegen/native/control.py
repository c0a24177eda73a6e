"""What the code of `@native` functions calls: branches and loops that fold what is known.

Each function takes the builder `f` first. Where the test or all bounds are known, it does what Python does.
`syntax.py` writes the calls; nobody else needs them, except for `current`, `Instruction` and `loop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeGuard

from rlx.codegen.native.irops import Int, Number
from rlx.codegen.native.irtext import Function, Value
from rlx.codegen.native.operators import number, truth
from rlx.errors import CompileError

locals_, NameError_ = locals, NameError  # for generated code, which reads the names that are bound


class Returned:
    """What a part of a function gives when it has returned; a part that goes on gives None."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class _Unset:
    """Stands for a name without a value."""


UNSET = _Unset()


def bound(held: dict[str, object], *names: str) -> list[object]:
    """The values of names, some of which have none. Rarely: generated code first tries to read them all."""
    return [held.get(name, UNSET) for name in names]


Part = Callable[[], Returned | None]
Names = tuple[str, ...]
Get = Callable[[], list[object]]
Put = Callable[[Sequence[object]], None]


EXPANDED = "__expanded__"
"""The attribute of a function to be expanded that holds what gives its code."""


# ---- the function under construction


class _State(threading.local):
    function: Function | None = None


state = _State()


def current() -> Function:
    """The function that is being written."""
    if state.function is None:
        raise CompileError("no native function is being written here; call this inside an @native function")
    return state.function


def enter(f: Function | None) -> Function | None:
    """Make `f` the function that is being written; gives the one before."""
    before, state.function = state.function, f
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


def mark(f: Function, line: str) -> None:
    """Note in the emitted text which line of Python wrote what follows."""
    if not f.ended:
        f.comment(line)


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
    get: Get = list,
    put: Put = lambda _: None,
) -> Returned | None:
    """Run one side if the test is known, else write both and merge the names that they assign."""
    if test.__class__ is not Value:
        if test:
            return then()
        return otherwise() if otherwise is not None else None
    before = get()
    truth(test)
    fork = f.fork(test)
    f.regions += 1
    first, left, first_ended = then(), get(), f.ended
    second, right, second_ended = None, before, False
    if otherwise is not None:
        fork.otherwise()
        put(before)
        second, right, second_ended = otherwise(), get(), f.ended
    elif not first_ended and any(
        old is not UNSET and not _equal(new, old) for new, old in zip(left, before, strict=True)
    ):
        fork.otherwise()
    f.regions -= 1
    if not fork.close():
        return Returned(None)
    if first_ended or second_ended:
        goes_on, result = (right, second) if first_ended else (left, first)
        put(goes_on)
        return result
    if names:
        put([_merge(fork.phi, f, repr(n), a, b) for n, a, b in zip(names, left, right, strict=True)])
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


_ONLY_VALUES = {Value}


def _is_flat(x: object) -> TypeGuard[list[Value]]:
    """Whether it is a list of Values. Most loops carry those, so they have a fast path."""
    return x.__class__ is list and set(map(type, x)) == _ONLY_VALUES


def _leaves(x: object) -> Sequence[Number]:
    """The numbers and Values of nested lists; nothing else is carried through a loop."""
    if _is_flat(x):
        return x
    if isinstance(x, list | tuple):
        found: list[Number] = []
        for inner in x:
            if inner.__class__ is Value:
                found.append(inner)
            else:
                found += _leaves(inner)
        return found
    return [x] if _is_leaf(x) else []


def _rebuilt(x: object, leaves: Iterator[object]) -> object:
    if _is_flat(x):
        return list(islice(leaves, len(x)))
    if isinstance(x, list | tuple):
        return x.__class__(
            [next(leaves) if inner.__class__ is Value else _rebuilt(inner, leaves) for inner in x]
        )
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

    __slots__ = ("before", "f", "get", "names", "plain", "put", "start")

    def __init__(self, f: Function, names: Names, get: Get, put: Put) -> None:
        self.f, self.names, self.get, self.put = f, names, get, put
        self.before = get()
        values = [held for held in self.before if held.__class__ is Value]
        self.plain = len(values) == len(names)
        self.start = values if self.plain else self._first()

    def _first(self) -> list[Value]:
        found: list[Value] = []
        for name, held in zip(self.names, self.before, strict=True):
            if held.__class__ is Value:
                found.append(held)
            elif _is_flat(held):
                found += held
            else:
                for leaf in _leaves(held):
                    if leaf.__class__ is Value:
                        found.append(leaf)
                    else:
                        found.append(self.f.value(leaf, _type_of(repr(name), leaf)))
        return found

    @property
    def unpack(self) -> Put:
        """What gives the names the values of a round."""
        return self.put if self.plain else self._rebuild

    def _rebuild(self, values: Sequence[object]) -> None:
        leaves = iter(values)
        self.put([_rebuilt(held, leaves) for held in self.before])

    def results(self) -> list[Value]:
        """The values at the end of the body."""
        out: list[Value] = []
        for name, held, found in zip(self.names, self.before, self.get(), strict=True):
            if found.__class__ is Value and held.__class__ is Value and found.type == held.type:
                out.append(found)
            else:
                out += self._checked(name, held, found)
        return out

    def _checked(self, name: str, before: object, after: object) -> list[Value]:
        """The leaves of `after`, which must be built like `before`."""
        if _is_flat(before) and _is_flat(after) and [x.type for x in before] == [x.type for x in after]:
            return after
        if isinstance(before, list | tuple):
            if before.__class__ is not after.__class__ or len(before) != len(after):
                raise CompileError(f"{name!r} changes its length or kind in a loop at run time")
            found: list[Value] = []
            for one, other in zip(before, after, strict=True):
                if one.__class__ is Value and other.__class__ is Value and one.type == other.type:
                    found.append(other)
                else:
                    found += self._checked(name, one, other)
            return found
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
    get: Get = list,
    put: Put = lambda _: None,
) -> None:
    """Write a loop that tests first. It runs at run time, whatever is known about its test now."""
    carried = _Carried(f, names, get, put)
    unpack = carried.unpack

    def holds(values: list[Value]) -> Value:
        unpack(values)
        return _condition(f, test())

    def once(_: list[Value]) -> list[Value]:
        _round(f, body)
        return carried.results()

    unpack(f.while_loop(carried.start, holds, once))


def _runs_once(lo: Int, hi: Int, step: Int) -> bool:
    """Whether it is known that a loop has one round."""
    if isinstance(lo, Value) or isinstance(hi, Value) or isinstance(step, Value):
        return False
    return lo < hi <= lo + step


def for_(
    f: Function,
    unrolls: bool,
    bounds: tuple[Int, ...],
    body: Callable[[Int], Returned | None],
    names: Names = (),
    get: Get = list,
    put: Put = lambda _: None,
) -> Returned | None:
    """`for i in range(...)`: Python repeats the body if it knows all bounds, else a loop does at run time.

    `for i in loop(...)` is a loop at run time always (`unrolls` is off).
    """
    if unrolls:
        numbers = [bound for bound in bounds if not isinstance(bound, Value)]
        if len(numbers) == len(bounds):
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
    if _runs_once(lo, hi, step) and all(held.__class__ is Value or _is_flat(held) for held in get()):
        _round(f, body, lo)  # nothing to carry
        return None
    carried = _Carried(f, names, get, put)
    unpack = carried.unpack

    def once(i: Int, values: list[Value]) -> list[Value]:
        unpack(values)
        _round(f, body, i)
        return carried.results()

    unpack(f.loop(lo, hi, step, carried.start, once))
    return None


def loop(*bounds: Int) -> Iterator[Int]:
    """Like `range`, but never repeated by Python: `for i in loop(0, 64, 16)` is always a loop at run time."""
    raise CompileError("loop(...) is only for the head of a `for` in a native function")
