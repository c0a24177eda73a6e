"""Records are dataclasses: whatever RLX uses of them behaves as in the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
import pytest

from rlx import records

MAKERS = pytest.mark.parametrize("make", [records.dataclass, dataclasses.dataclass], ids=["rlx", "standard"])
OPTIONS = [{}, {"frozen": True}, {"frozen": True, "slots": True}, {"slots": True}, {"kw_only": True}]


def point(make: Any, **options: Any) -> Any:
    @make(**options)
    class Point:
        kind: ClassVar[str] = "point"
        x: int
        y: int = 2
        seen: list[int] = field(default_factory=list)
        note: str = field(default="", repr=False, compare=False)
        length: int = field(init=False, default=7)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", self.x + self.y)

    return Point


@MAKERS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_objects(make: Any, options: dict[str, bool]) -> None:
    cls = point(make, **options)
    one, same, other = cls(x=1), cls(x=1, note="n"), cls(x=1, y=3)
    assert repr(one).endswith("Point(x=1, y=2, seen=[], length=3)")
    assert one == same and one != other and one != "Point" and one.seen is not same.seen
    assert [f.name for f in dataclasses.fields(cls)] == ["x", "y", "seen", "note", "length"]
    assert dataclasses.is_dataclass(one) and dataclasses.asdict(other)["y"] == 3
    assert dataclasses.replace(one, y=3) == other
    assert str(inspect.signature(cls)).startswith("(*, x" if options.get("kw_only") else "(x")
    assert copy.copy(one) == one and copy.deepcopy(one) == one
    assert cls.__match_args__ == (() if options.get("kw_only") else ("x", "y", "seen", "note"))
    assert hasattr(one, "__dict__") == (not options.get("slots"))
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        cls(x=1, z=2)


@MAKERS
@pytest.mark.parametrize("slots", [False, True])
def test_frozen_objects_stay_as_they_are(make: Any, slots: bool) -> None:
    @make(frozen=True, slots=slots)
    class Pair:
        a: int
        b: tuple[int, ...] = ()

    pair = Pair(1, (2,))
    assert hash(pair) == hash(Pair(1, (2,))) and len({pair, Pair(1, (2,)), Pair(1)}) == 2
    for change in (lambda: setattr(pair, "a", 2), lambda: delattr(pair, "b")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert pair == Pair(1, (2,))


@MAKERS
def test_a_class_of_another_kind_that_derives_from_a_frozen_one_has_attributes_of_its_own(make: Any) -> None:
    @make(frozen=True)
    class Pair:
        a: int
        b: int = 0

    class Grown(Pair):
        pass

    grown: Any = Grown(1)
    grown.extra = 5
    assert grown.extra == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        grown.a = 2


@MAKERS
def test_classes_that_derive_and_methods_of_their_own(make: Any) -> None:
    @make(frozen=True)
    class Base:
        a: int
        b: int = 1

        def __repr__(self) -> str:
            return f"<{self.a}>"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Base) and self.a == other.a

        def __hash__(self) -> int:
            return 17

    @make(frozen=True)
    class Derived(Base):
        b: int = 5
        c: str = "c"

    @make
    class Unhashable:
        a: float

    assert repr(Base(1)) == "<1>" and Base(1, 2) == Base(1, 3) and hash(Base(4)) == 17
    assert Derived(1).b == 5 and Derived(1, 2, "d") == Derived(a=1, b=2, c="d") != Derived(1, 2)
    assert [f.name for f in dataclasses.fields(Derived)] == ["a", "b", "c"]
    assert hash(Derived(1)) == hash(Derived(1)) != 17
    assert Unhashable.__hash__ is None  # type: ignore[comparison-overlap]
    nan = float("nan")
    assert Unhashable(nan) == Unhashable(nan)
    array = np.arange(3)
    assert Unhashable(array) == Unhashable(array)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="default"):

        @make
        class Shared:
            values: list[int] = []


@records.dataclass(frozen=True, slots=True)
class Packed:
    a: int
    b: str = "b"


def test_objects_with_slots_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Packed(3))) == Packed(3)


@MAKERS
def test_only_the_fields_of_the_class_itself_are_given_by_name(make: Any) -> None:
    @make
    class Base:
        a: int
        b: int = 2

    @make(kw_only=True)
    class Named(Base):
        c: str  # may lack a default although it follows one

    @make
    class Further(Named):
        d: int = 4

    assert str(inspect.signature(Named)).startswith("(a")
    assert Named(1, c="c") == Named(a=1, b=2, c="c") and Named.__match_args__ == ("a", "b")
    further = Further(1, 2, 3, c="c")
    assert (further.a, further.b, further.c, further.d) == (1, 2, "c", 3)
    with pytest.raises(TypeError):
        Named(1, 2, "c")
