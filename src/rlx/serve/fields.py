"""Fields of a request: each is asked for by name and type, and what nobody asked for is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NoReturn

from rlx.files import Json
from rlx.serve.refusal import Refusal

_SHOWN = 60  # characters of a wrong value that a message repeats


def parse_object(body: bytes | bytearray) -> Json:
    """A JSON object; 400 for anything else.

    >>> parse_object(b'{"n": 1}')
    {'n': 1}
    >>> parse_object(b'{"n": NaN}')
    Traceback (most recent call last):
    rlx.serve.refusal.Refusal: the body is not valid JSON: NaN is not a number of JSON
    """
    try:
        found = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers of any length
        raise Refusal(400, f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be a JSON object")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


class Fields:
    """The fields of a JSON object; null counts as not given.

    >>> fields = Fields({"n": 1, "temperatur": 0.5})
    >>> fields.whole("n", 1, 1)
    1
    >>> fields.finish()
    Traceback (most recent call last):
    rlx.serve.refusal.Refusal: unknown or unsupported field 'temperatur'
    """

    def __init__(self, values: Json, at: str = "") -> None:
        self._values, self._at, self._known = values, at, set[str]()

    def at(self, name: str) -> str:
        """The name of a field as errors have it, with the objects it is in."""
        return f"{self._at}.{name}" if self._at else name

    def given(self, name: str) -> object:
        """A value as it is, or None."""
        self._known.add(name)
        return self._values.get(name)

    def wrong(self, name: str, wanted: str) -> NoReturn:
        shown = repr(self._values.get(name))
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        raise Refusal(400, f"{self.at(name)} is {shown}; it must be {wanted}", param=self.at(name))

    def text(self, name: str) -> str | None:
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.wrong(name, "a text")
        return self.encodable(name, value)

    def encodable(self, name: str, value: str) -> str:
        """JSON can hold halves of characters, which are not text."""
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refusal(
                400,
                f"{self.at(name)} has half a surrogate pair; it must be Unicode text",
                param=self.at(name),
            ) from None
        return value

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...]:
        """One text, or a list of at most so many, each of at most so many characters."""
        value = self.given(name)
        given = [] if value is None else value if isinstance(value, list) else [value]
        found = [self.encodable(name, one) for one in given if isinstance(one, str)]
        if len(given) > most or len(found) < len(given):
            self.wrong(name, f"a text or a list of at most {most} texts")
        if any(len(one) > longest for one in found):
            self.wrong(name, f"texts of at most {longest} characters")
        return tuple(found)

    def flag(self, name: str) -> bool:
        value = self.given(name)
        if value is not None and not isinstance(value, bool):
            self.wrong(name, "true or false")
        return bool(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.given(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.wrong(name, f"a whole number from {low} to {high}" if low < high else str(low))
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.given(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value) if math.isfinite(value) else self.wrong(name, "finite")

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        value = self.given(name)
        if value is not None and value not in known:
            self.wrong(name, " or ".join(map(repr, known)))
        return value if isinstance(value, str) else None

    def inner(self, name: str) -> Fields | None:
        value = self.given(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name, "an object")
        return Fields(value, self.at(name))

    def inners(self, name: str) -> list[Fields]:
        """A list of objects."""
        value = self.given(name)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.wrong(name, "a list of objects")
        return [Fields(one, f"{self.at(name)}[{i}]") for i, one in enumerate(value)]

    def finish(self) -> None:
        """Refuse what nobody has asked for."""
        for name in self._values:
            if name not in self._known:
                shown = self.at(name) if len(name) <= _SHOWN else self.at(name[:_SHOWN]) + "..."
                raise Refusal(
                    400, f"unknown or unsupported field {shown!r}", param=shown, code="unsupported_parameter"
                )
