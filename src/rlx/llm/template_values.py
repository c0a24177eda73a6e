"""What chat templates may compute with: operators, filters, tests and methods, all with limits."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Operation: TypeAlias = Callable[..., object]

_LONGEST = 1 << 22


class Stop(Exception):
    """A template does what is not allowed."""


class Undefined:
    """A value that a template asks for and that was not given; it is false, empty, and has no text."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""

    def __repr__(self) -> str:
        return "Undefined"

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Undefined)

    __hash__ = object.__hash__


UNDEFINED = Undefined()


class Namespace:
    """What `namespace(...)` makes: values that the bodies of loops may set."""

    def __init__(self, given: Mapping[str, object] | None = None, **named: object) -> None:
        self.values: dict[str, object] = {**(given or {}), **named}


class LoopState:
    """The name `loop` inside a loop."""

    def __init__(self, items: Sequence[object]) -> None:
        self.items, self.index0 = items, 0

    def get(self, name: str) -> object:
        i, count = self.index0, len(self.items)
        members: dict[str, Callable[[], object]] = {
            "index": lambda: i + 1,
            "index0": lambda: i,
            "revindex": lambda: count - i,
            "revindex0": lambda: count - i - 1,
            "first": lambda: i == 0,
            "last": lambda: i == count - 1,
            "length": lambda: count,
            "previtem": lambda: self.items[i - 1] if i else UNDEFINED,
            "nextitem": lambda: self.items[i + 1] if i + 1 < count else UNDEFINED,
        }
        return members[name]() if name in members else UNDEFINED


def limited(value: T) -> T:
    """A value, unless it is too long.

    >>> limited("short")
    'short'
    """
    if isinstance(value, str | list | tuple | range | dict) and len(value) > _LONGEST:
        raise Stop(f"it makes a value of more than {_LONGEST} elements")
    return value


def elements(value: object) -> list[object]:
    """What a loop runs over.

    >>> elements("ab")
    ['a', 'b']
    """
    if not isinstance(value, str | list | tuple | range | Mapping | Undefined):
        raise Stop(f"it takes the elements of a {type(value).__name__}")
    return list(limited(value))


def weight(value: object, most: int) -> int:
    """How much work a value is: its elements, those inside them too, and a part of the length of texts.

    >>> weight(["a", {"b": [1, 2]}], 100)
    6
    """
    total, waiting = 0, [value]
    while waiting and total <= most:
        one = waiting.pop()
        total += 1
        if isinstance(one, str):
            total += len(one) // 64
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return total


def plain(value: object) -> str:
    """A value as text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | Undefined) or value is None:
        return str(value)
    if isinstance(value, list | tuple | dict):
        return limited(str(value))
    raise Stop(f"it writes a {type(value).__name__} as text")


def _plus(a: object, b: object) -> object:
    kinds = (str, list, tuple)
    both = any(isinstance(a, kind) and isinstance(b, kind) for kind in kinds)
    if not (both or (_is_number(a) and _is_number(b))):
        raise Stop(f"it adds a {type(a).__name__} and a {type(b).__name__}")
    return operator.add(a, b)


def _arithmetic(function: Operation) -> Operation:
    """An operator for numbers of ordinary size only: texts times numbers, or % with formats, may explode."""

    def checked(a: float, b: float) -> object:
        if not (_is_number(a) and _is_number(b)) or max(abs(a), abs(b)) > 1e18:
            raise Stop(f"it computes with a {type(a).__name__} and a {type(b).__name__}")
        return function(a, b)

    return checked


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


BINARY: dict[str, Operation] = {
    "Add": _plus,
    "Sub": _arithmetic(operator.sub),
    "Mul": _arithmetic(operator.mul),
    "Div": _arithmetic(operator.truediv),
    "FloorDiv": _arithmetic(operator.floordiv),
    "Mod": _arithmetic(operator.mod),
}

_COMPARISONS: dict[str, Operation] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda a, b: a in b,
    "notin": lambda a, b: a not in b,
}


def compare(name: str, a: object, b: object) -> bool:
    """Whether a comparison holds.

    >>> compare("lteq", 1, 2)
    True
    """
    return bool(_COMPARISONS[name](a, b))


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    if len(new) > len(old):
        limited(range(len(text) + text.count(old) * (len(new) - len(old))))
    return text.replace(old, new, count)


_TEXT: dict[str, Operation] = {
    method.__name__: method
    for method in (
        str.strip, str.lstrip, str.rstrip, str.upper, str.lower, str.title, str.capitalize, str.startswith,
        str.endswith, str.split, str.rsplit, str.splitlines, str.find, str.count, str.removeprefix,
        str.removesuffix, str.isdigit, str.isalpha, str.isspace,
    )
}  # fmt: skip

METHODS: dict[tuple[type, str], Operation] = {
    **{(str, name): method for name, method in _TEXT.items()},
    (str, "replace"): _replace,
    (str, "join"): lambda text, parts: _join(parts, text),
    (dict, "items"): lambda d: list(d.items()),
    (dict, "keys"): lambda d: list(d),
    (dict, "values"): lambda d: list(d.values()),
    (dict, "get"): lambda d, key, default=None: d.get(key, default),
    (list, "append"): lambda items, value: _append(items, value),
    (list, "index"): lambda items, value: items.index(value),
    (list, "count"): lambda items, value: items.count(value),
}
"""Methods by the type of their owner, which must be exactly it."""


def _append(items: list[object], value: object) -> None:
    if items is value or weight(value, _LONGEST) > _LONGEST:
        raise Stop("it appends a list to itself")
    limited(items).append(value)


def _join(parts: Iterable[object], between: str = "", attribute: str | None = None) -> str:
    texts = [plain(part if attribute is None else _member(part, attribute)) for part in parts]
    limited(range(sum(map(len, texts)) + len(between) * len(texts)))
    return between.join(texts)


def _member(value: object, name: str) -> object:
    return value.get(name, UNDEFINED) if isinstance(value, Mapping) else UNDEFINED


def _to_json(
    value: object,
    indent: int | None = None,
    ensure_ascii: bool = False,
    sort_keys: bool = False,
    separators: tuple[str, str] | None = None,
) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise Stop(f"it indents JSON by {indent}")
    if separators is not None and max(map(len, separators)) > 16:
        raise Stop("it separates JSON by more than 16 characters")
    encoder = json.JSONEncoder(
        indent=indent,
        ensure_ascii=bool(ensure_ascii),
        sort_keys=bool(sort_keys),
        separators=separators,
    )
    parts, length = [], 0
    for part in encoder.iterencode(value):  # indents of deep lists may be longer than all else
        parts.append(part)
        length += len(part)
        limited(range(length))
    return "".join(parts)


def _default(value: object, other: object = "", boolean: bool = False) -> object:
    return other if isinstance(value, Undefined) or (boolean and not value) else value


def _map(items: Iterable[object], *name: str, attribute: str | None = None) -> list[object]:
    if attribute is not None:
        return [_member(item, attribute) for item in items]
    if len(name) != 1 or name[0] not in FILTERS:
        raise Stop(f"it maps {name}, which is not a filter of chat templates")
    return [FILTERS[name[0]](item) for item in items]


def _selected(keep: bool, by_attribute: bool) -> Callable[..., list[object]]:
    def select(items: Iterable[object], *given: str) -> list[object]:
        name, *rest = given if by_attribute else ("", *given)
        test, *more = rest or [""]
        found = TESTS.get(test) if test else bool
        if found is None:
            raise Stop(f"it selects by {test!r}, which is not a test of chat templates")
        return [
            item
            for item in items
            if bool(found(_member(item, name) if by_attribute else item, *more)) == keep
        ]

    return select


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= 64:
        raise Stop(f"it indents by {width}")
    lines = text.split("\n")
    limited(range(len(text) + width * len(lines)))
    put = [" " * width + line if line or blank else line for line in lines]
    return "\n".join(put if first else [lines[0], *put[1:]])


def _first(items: Iterable[object]) -> object:
    return next(iter(items), UNDEFINED)


FILTERS: dict[str, Operation] = {
    "trim": lambda text, characters=None: plain(text).strip(characters),
    "strip": lambda text: plain(text).strip(),
    "length": len,
    "count": len,
    "join": _join,
    "upper": lambda text: plain(text).upper(),
    "lower": lambda text: plain(text).lower(),
    "title": lambda text: plain(text).title(),
    "capitalize": lambda text: plain(text).capitalize(),
    "replace": lambda text, *given: _replace(plain(text), *given),
    "tojson": _to_json,
    "default": _default,
    "d": _default,
    "first": _first,
    "last": lambda items: _first(reversed(list(items))),
    "list": list,
    "items": lambda d: list(d.items()) if isinstance(d, Mapping) else [],
    "dictsort": lambda d: sorted(d.items()),
    "string": plain,
    "safe": plain,
    "int": lambda value, default=0: int(value) if str(value).strip().lstrip("+-").isdigit() else default,
    "float": float,
    "abs": abs,
    "map": _map,
    "select": _selected(True, False),
    "reject": _selected(False, False),
    "selectattr": _selected(True, True),
    "rejectattr": _selected(False, True),
    "indent": _indent,
    "reverse": lambda items: items[::-1] if isinstance(items, str) else list(reversed(list(items))),
    "sort": lambda items: sorted(items),
    "unique": lambda items: list(dict.fromkeys(items)),
}

SELECTING = ("select", "reject", "selectattr", "rejectattr")
"""Filters that compare each element with what they are given."""

TESTS: dict[str, Callable[..., bool]] = {
    "defined": lambda value: not isinstance(value, Undefined),
    "undefined": lambda value: isinstance(value, Undefined),
    "none": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "mapping": lambda value: isinstance(value, Mapping),
    "iterable": lambda value: isinstance(value, str | list | tuple | range | Mapping),
    "sequence": lambda value: isinstance(value, str | list | tuple | range | Mapping),
    "number": lambda value: _is_number(value),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, float),
    "boolean": lambda value: isinstance(value, bool),
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "equalto": operator.eq,
    "eq": operator.eq,
    "==": operator.eq,
    "ne": operator.ne,
    "in": lambda a, b: a in b,
    "odd": lambda value: BINARY["Mod"](value, 2) == 1,
    "even": lambda value: BINARY["Mod"](value, 2) == 0,
}
