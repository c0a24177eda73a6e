"""`dataclass` as in the standard library, created in a sixth of the time.

A start creates some fifty of these classes and a compilation two hundred. Python 3.11 compiles up to seven
functions from text for each, 0.4 ms a class, which was a sixth of a warm start. Here only `__init__` is
compiled; the other methods are the same for all classes and read the names of the fields. What `dataclasses`
needs to know (`fields`, `replace`, `asdict`) it finds out on first use.

Type checkers see the standard decorator. Of its options there are those that RLX uses; there is no `InitVar`,
and no field is `kw_only` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, field
from dataclasses import dataclass as standard_dataclass
from operator import attrgetter
from reprlib import recursive_repr
from types import FunctionType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from typing import Protocol

    class _Record(Protocol):
        """An object of such a class."""

        __record_fields__: dict[str, Field[object]]

else:

    def dataclass(cls=None, /, **options):
        """Make a class a dataclass.

        >>> @dataclass(frozen=True)
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(3), Point(1, 2) == Point(y=2, x=1)
        (Point(x=3, y=0), True)
        """
        return _make(cls, **options) if cls is not None else lambda cls: _make(cls, **options)


def _make(
    cls: type,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,
    kw_only: bool = False,
) -> type:
    own: dict[str, object] = {name: cls.__dict__.get(name, MISSING) for name in _field_names(cls)}
    fields: dict[str, Field[object]] = {}
    by_name: set[str] = set(own) if kw_only else set()  # of a class that extends another, its own alone
    for base in cls.__mro__[-1:0:-1]:
        fields |= base.__dict__.get("__record_fields__", {})
        by_name |= base.__dict__.get("__record_by_name__", set())
    for name, default in own.items():
        known: object = default if isinstance(default, Field) else field(default=default)
        assert isinstance(known, Field)
        fields[name] = known
        _set_default(cls, name, default)
    methods: dict[str, object] = {"__init__": _init(cls, fields, frozen, by_name)}
    if repr:
        methods["__repr__"] = _repr_of([name for name, known in fields.items() if known.repr])
    if eq:
        methods |= _eq_and_hash([name for name, known in fields.items() if known.compare], frozen)
    for name, method in methods.items():
        # Where a class writes __eq__, Python sets __hash__ to None: that was no choice of the class.
        if cls.__dict__.get(name) is None:
            setattr(cls, name, method)
    if frozen:
        _give(cls, {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete})
    matched = tuple(name for name, known in fields.items() if known.init and name not in by_name)
    _give(cls, {"__match_args__": matched})
    if slots:
        cls = _with_slots(cls, own, frozen)
    _give(cls, {"__record_fields__": fields, "__record_by_name__": by_name})
    _give(cls, {"__dataclass_fields__": _StandardFields(cls, own)})
    return cls


def _give(cls: type, members: Mapping[str, object]) -> None:
    for name, member in members.items():
        setattr(cls, name, member)


def _field_names(cls: type) -> Iterable[str]:
    for name, annotation in cls.__annotations__.items():
        if not str(annotation).startswith(("ClassVar", "typing.ClassVar")):
            yield name


def _set_default(cls: type, name: str, default: object) -> None:
    """Leave on the class what objects without their own value show."""
    if not isinstance(default, Field):
        if type(default).__hash__ is None:
            raise ValueError(
                f"{cls.__name__}.{name}: a default that changes needs field(default_factory=...)"
            )
    elif default.default is MISSING:
        delattr(cls, name)
    else:
        setattr(cls, name, default.default)


def _init(cls: type, fields: dict[str, Field[object]], frozen: bool, by_name: set[str]) -> FunctionType:
    """`__init__`, compiled: it runs for every node of a graph."""
    names: dict[str, object] = {"_set": object.__setattr__, "_absent": MISSING}
    arguments: dict[bool, list[str]] = {False: ["self"], True: []}  # by place, by name
    lines = []
    for name, known in fields.items():
        value, given = name, ""
        if known.default_factory is not MISSING:
            names["_make_" + name] = known.default_factory
            value, given = f"_make_{name}() if {name} is _absent else {name}", "=_absent"
        elif known.default is not MISSING:
            names["_default_" + name] = known.default
            given = f"=_default_{name}"
        if known.init:
            arguments[name in by_name].append(name + given)
        elif known.default_factory is not MISSING:
            value = f"_make_{name}()"
        else:
            continue  # the class shows the default, or __post_init__ sets a value
        lines.append(f" _set(self, {name!r}, {value})" if frozen else f" self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    listed = [*arguments[False], *(["*", *arguments[True]] if arguments[True] else [])]
    source = f"def __init__({', '.join(listed)}):\n" + ("\n".join(lines) or " pass")
    exec(compile(source, "<rlx record>", "exec"), names)
    made = names["__init__"]
    assert isinstance(made, FunctionType)
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made


def _repr_of(names: list[str]) -> Callable[[object], str]:
    def __repr__(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return recursive_repr("...")(__repr__)


def _eq_and_hash(names: list[str], frozen: bool) -> dict[str, object]:
    # Of one name attrgetter makes no tuple, and only in a tuple does an object always equal itself.
    values = attrgetter(*names) if len(names) > 1 else lambda self: tuple(getattr(self, n) for n in names)

    def __eq__(self: object, other: object) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    def __hash__(self: object) -> int:
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}


def _refuse_to_set(self: _Record, name: str, value: object) -> None:
    if _is_frozen(self, name):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_to_delete(self: _Record, name: str) -> None:
    if _is_frozen(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_frozen(self: _Record, name: str) -> bool:
    """A class that derives from a frozen one and is not a dataclass itself may have its own attributes."""
    return name in self.__record_fields__ or "__record_fields__" in type(self).__dict__


def _with_slots(cls: type, own: Mapping[str, object], frozen: bool) -> type:
    """The class again, as slots must be known when a class is created."""
    left_out = {*own, "__dict__", "__weakref__"}
    body = {name: value for name, value in cls.__dict__.items() if name not in left_out}
    body["__slots__"] = tuple(own)
    if frozen:  # copying and pickling would set attributes otherwise
        body |= {"__getstate__": _getstate, "__setstate__": _setstate}
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


def _getstate(self: _Record) -> list[object]:
    return [getattr(self, name) for name in self.__record_fields__]


def _setstate(self: _Record, state: list[object]) -> None:
    for name, value in zip(self.__record_fields__, state, strict=True):
        object.__setattr__(self, name, value)


class _StandardFields:
    """`__dataclass_fields__` until somebody asks: then the standard library creates them, from a copy."""

    def __init__(self, cls: type, own: Mapping[str, object]) -> None:
        self._cls, self._own = cls, own

    def __get__(self, instance: object, owner: type) -> dict[str, Field[object]]:
        cls = self._cls
        body = {name: default for name, default in self._own.items() if default is not MISSING}
        body |= {"__annotations__": cls.__annotations__, "__module__": cls.__module__}
        likeness: type = standard_dataclass(init=False, repr=False, eq=False)(type(cls.__name__, (), body))
        found: dict[str, Field[object]] = {}
        for base in cls.__mro__[-1:0:-1]:
            found |= getattr(base, "__dataclass_fields__", {})
        found |= likeness.__dict__["__dataclass_fields__"]
        _give(cls, {"__dataclass_fields__": found})
        return found
