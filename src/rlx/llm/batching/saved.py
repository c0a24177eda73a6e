"""Generations on disk: what was asked, what was said, and the keys and values of it.

A file is a line of JSON, then keys and values of the tokens that were computed. They only save time: without
them, the same bits are computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict

import numpy as np

from rlx.errors import ConfigError, FormatError
from rlx.files import file_boundary, read_plain, replacing
from rlx.llm.batching.pages import pages_for
from rlx.llm.batching.sequence import Request
from rlx.llm.sample import Sampling
from rlx.llm.tensors import Tensors
from rlx.records import dataclass

_KIND = "rlx generation 1"
_KEYS = "halves"  # the order of the features of keys, which other versions have otherwise


@dataclass(frozen=True, eq=False)
class Saved:
    """A generation between two of its tokens. `states` has the pages of the first `computed` tokens."""

    model: str
    request: Request
    made: tuple[int, ...]
    random: dict[str, object]
    computed: int
    states: dict[str, np.ndarray]


def model_mark(tensors: Tensors, target: str, *rounded: str) -> str:
    """What tells one model from another, and machines whose bits differ. `rounded` says what is not f32."""
    return hashlib.sha256(" ".join((target, _KEYS, *rounded, tensors.mark)).encode()).hexdigest()


def write_saved(path: str | os.PathLike[str], saved: Saved) -> None:
    """Write a file, all of it or nothing."""
    request = saved.request
    head = {
        "kind": _KIND,
        "model": saved.model,
        "request": {**asdict(request), "sampling": asdict(request.sampling)},
        "made": saved.made,
        "random": saved.random,
        "computed": saved.computed,
        "states": {name: value.shape for name, value in saved.states.items()},
    }
    try:
        with replacing(path) as file:
            file.write(json.dumps(head).encode() + b"\n")
            for value in saved.states.values():
                file.write(np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes())
    except OSError as error:
        raise FormatError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def read_saved(path: str | os.PathLike[str], model: str, pools: dict[str, np.ndarray]) -> Saved:
    """What a file holds, which must be of this model, with pages as those of the pools."""
    with file_boundary(path, "saved generation"):
        data = read_plain(path)
        line, _, rest = data.partition(b"\n")
        if _KIND.encode() not in line[:200]:
            raise ValueError("it does not begin as one")
        head = json.loads(line)
        if head["model"] != model:
            raise ConfigError(
                f"{os.fspath(path)} was saved with another model or on a machine with other instructions; "
                "restore it where it was saved"
            )
        asked = dict(head["request"])
        asked["sampling"] = Sampling(**asked["sampling"])
        asked |= {"tokens": tuple(map(int, asked["tokens"])), "stop": tuple(map(str, asked["stop"]))}
        request, made, computed = Request(**asked), tuple(map(int, head["made"])), int(head["computed"])
        if not 0 <= computed < len(request.tokens) + len(made):
            raise ValueError(f"{computed} of its tokens cannot be computed")
        count, states, at = pages_for(computed), {}, 0
        if len(rest) != sum(count * math.prod(p.shape[1:]) * p.itemsize for p in pools.values()):
            raise ValueError("its keys and values have another size than its tokens need")
        for name, pool in pools.items():
            shape, kind = (count, *pool.shape[1:]), pool.dtype.newbyteorder("<")
            states[name] = np.frombuffer(rest, kind, math.prod(shape), at).reshape(shape)
            at += states[name].nbytes
        return Saved(model, request, made, dict(head["random"]), computed, states)
