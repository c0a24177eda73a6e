"""What a prepared file says of its model: sizes and flags, tensors and their formats, how texts are pooled.

It is JSON that anybody may have written: every value has the type of its field, and is checked as a model
file's own is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from types import NoneType, UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

from rlx.errors import FormatError
from rlx.files import Json, file_boundary
from rlx.llm.blocks import FORMATS
from rlx.llm.config import ACTIVATIONS, ARITHMETIC, DECODERS, ENCODERS, Config, checked
from rlx.llm.encoders.pooling import POOLS, Pooling
from rlx.llm.tensors import Entry, InMemory, Tensors
from rlx.records import dataclass

T = TypeVar("T")

_FORMATS = {format.name: format for format in FORMATS.values()}
_MOST_ELEMENTS = 1 << 48
_MOST_NAME = 256  # characters of a name


@dataclass(frozen=True, eq=False)
class Settings:
    """A model without its weights."""

    config: Config
    positions: int
    """Tokens that its programs have room for."""
    pooling: Pooling
    tensors: Tensors
    """Names, shapes and formats; what decoders make of them has its values elsewhere."""


def written(settings: Settings) -> bytes:
    """The settings as JSON."""
    tensors = settings.tensors
    about = {
        "config": asdict(settings.config),
        "positions": settings.positions,
        "pooling": asdict(settings.pooling),
        "tensors": [[e.name, list(e.shape), e.format.name] for e in tensors.entries.values()],
        "mark": tensors.mark,
    }
    return json.dumps(about).encode()


def read(path: str, text: bytes) -> Settings:
    """Settings of the prepared file at `path`."""
    with file_boundary(path, "prepared model"):
        about: Json = json.loads(text)
        config = record(Config, about["config"])
        kinds = {"architecture": (*DECODERS, *ENCODERS), "activation": tuple(ARITHMETIC)}
        kinds |= {"activations": ACTIVATIONS, "kv": ACTIVATIONS}
        for name, known in kinds.items():
            if getattr(config, name) not in known:
                raise FormatError(
                    f"{path}: its {name} is {getattr(config, name)[:40]!r}, which does not exist"
                )
        checked(path, config)
        if not math.isfinite(config.eps):
            raise FormatError(f"{path}: its epsilon is {config.eps}")
        positions, pooling = value(int, about["positions"]), record(Pooling, about["pooling"])
        if not 1 <= positions <= config.context or pooling.mode not in POOLS:
            raise FormatError(
                f"{path}: {positions} of {config.context} tokens, pooling by {pooling.mode[:40]!r}"
            )
        tensors = Tensors(path, {})
        nothing = InMemory(b"", path)
        for name, shape, format in about["tensors"]:
            entry = _entry(path, name, value(tuple[int, ...], shape), format, nothing)
            tensors.entries[entry.name] = entry
        tensors.mark = value(str, about["mark"])
        return Settings(config, positions, pooling, tensors)


def _entry(path: str, name: object, shape: tuple[int, ...], format: object, source: InMemory) -> Entry:
    known = _FORMATS.get(value(str, format))
    plain = value(str, name)
    sound = 1 <= len(shape) <= 4 and min(shape) >= 1 and math.prod(shape) <= _MOST_ELEMENTS
    if known is None or not sound or shape[-1] % known.size or not 1 <= len(plain) <= _MOST_NAME:
        raise FormatError(f"{path}: tensor {plain[:40]!r} has the shape {list(shape)[:5]} of {format!r:.40}")
    return Entry(plain, shape, known, source, 0)


def record(kind: type[T], given: object) -> T:
    """A dataclass from a dict with its fields, and nothing else. Files of earlier versions do not have fields
    that came later: these have defaults.

    >>> record(Pooling, {"mode": "max", "normalised": False})
    Pooling(mode='max', normalised=False)
    >>> record(Pooling, {"mode": "max", "normalised": 1})
    Traceback (most recent call last):
    ValueError: 1 is not of type bool
    """
    kinds = get_type_hints(kind)
    least = {f.name for f in fields(kind) if f.default is MISSING}  # type: ignore[arg-type]
    if not isinstance(given, Mapping) or not least <= given.keys() <= kinds.keys():
        raise ValueError(f"it does not have the fields of {kind.__name__}")
    return kind(**{name: value(kinds[name], one) for name, one in given.items()})


def value(kind: type[T], given: object) -> T:
    """A value of JSON as one of this type.

    >>> value(tuple[float, ...], [1, 2.5]), value(float | None, None)
    ((1.0, 2.5), None)
    """
    if get_origin(kind) is UnionType:
        (one,) = (one for one in get_args(kind) if one is not NoneType)
        return cast("T", None if given is None else value(one, given))
    if get_origin(kind) is tuple and isinstance(given, list):
        return cast("T", tuple(value(get_args(kind)[0], one) for one in given))
    if kind is float and type(given) is int:
        return cast("T", float(given))
    if get_origin(kind) is None and type(given) is kind:
        return given
    if isinstance(given, Mapping):
        return record(kind, given)
    raise ValueError(f"{given!r:.40} is not of type {getattr(kind, '__name__', kind)}")
