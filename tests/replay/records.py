"""What programs were when somebody last looked: a line of digests for each and every named target.

    softmax  x86-64-v3  plan=0a1b2c3d4e5f  ir=...  bits=...

plan: the text of the plan. ir: the code in canonical form. bits: the results on seeded inputs, `-` while no
machine that runs the target has recorded them. `bits=stale:...` were recorded for other code: a machine that
runs the target records them anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

UNKNOWN, STALE = "-", "stale:"
_DIGITS = 12


def digest(*parts: str | bytes) -> str:
    """A short digest of texts, in their order.

    >>> digest("a", "b") == digest("ab"), len(digest("a"))
    (False, 12)
    """
    made = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()[:_DIGITS]


def digest_of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """The bits of results, with their names, types and shapes."""
    return digest(
        *(part for name, a in arrays.items() for part in (name, f"{a.dtype}{a.shape}", a.tobytes()))
    )


class Key(NamedTuple):
    """What a line is about."""

    name: str
    target: str


@dataclass(frozen=True)
class Digests:
    """The digests of a line; `bits` is None where this machine cannot run the target."""

    plan: str
    ir: str
    bits: str | None

    @staticmethod
    def joined(parts: Iterable[Digests]) -> Digests:
        """One for a group."""
        plans, irs, bits = zip(*((d.plan, d.ir, d.bits) for d in parts), strict=True)
        return Digests(digest(*plans), digest(*irs), None if None in bits else digest(*bits))

    def after(self, before: Digests | None) -> Digests:
        """What to record: bits that cannot be computed here stay, and are marked if the code is another.

        >>> new = Digests("p", "i", None)
        >>> [new.after(before).bits for before in (None, Digests("p", "i", "b"), Digests("p", "old", "b"))]
        ['-', 'b', 'stale:b']
        """
        if self.bits is not None:
            return self
        if before is None or before.bits in (None, UNKNOWN):
            return replace(self, bits=UNKNOWN)
        if self.ir == before.ir or before.bits.startswith(STALE):
            return replace(self, bits=before.bits)
        return replace(self, bits=STALE + before.bits)


class Records:
    """A file of digests."""

    def __init__(self, path: Path, accept: str) -> None:
        self.path = path
        self.accept = accept  # the command that accepts a change

    def read(self) -> dict[Key, Digests]:
        out = {}
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            name, target, *fields = line.split()
            out[Key(name, target)] = Digests(**dict(field.split("=", 1) for field in fields))
        return out

    def write(self, changes: Mapping[Key, Digests], drop: Collection[Key] = ()) -> None:
        """Enter and drop lines. Other processes may do so at the same time."""
        with _locked(self.path.parent):
            lines = self.read()
            lines |= {key: made.after(lines.get(key)) for key, made in changes.items()}
            text = "".join(
                f"{key.name:24} {key.target:20} plan={d.plan} ir={d.ir} bits={d.bits}\n"
                for key, d in sorted(lines.items())
                if key not in drop
            )
            if not self.path.exists() or text != self.path.read_text("utf-8"):
                new = self.path.with_suffix(".new")
                new.write_text(text, "utf-8")
                os.replace(new, self.path)

    def differences(self, found: Mapping[Key, Digests]) -> list[str]:
        """A sentence for every line that is not as recorded, and how to accept them."""
        recorded, out = self.read(), []
        for key, now in found.items():
            before, place = recorded.get(key), f"{key.name} on {key.target}"
            if before is None:
                out.append(f"{place}: nothing is recorded")
                continue
            if now.plan != before.plan:
                out.append(f"{place}: the plan changed ({before.plan} -> {now.plan})")
            if now.ir != before.ir:
                out.append(f"{place}: the emitted IR changed ({before.ir} -> {now.ir})")
            if now.bits not in (None, before.bits) and _comparable(before):
                out.append(f"{place}: the output bits changed ({before.bits} -> {now.bits})")
        if out:
            out += [
                f"A refactoring leaves {self.path.name} as it is; any other change says why in its commit.",
                "See what changed: add --replay-texts=DIR, here and at the commit before, and compare.",
                f"Accept it: {self.accept}",
            ]
        return out

    def unrecorded(self, found: Mapping[Key, Digests]) -> list[Key]:
        """Lines whose bits nobody has recorded for this code, though this machine can."""
        recorded = self.read()
        return [
            key
            for key, now in found.items()
            if key in recorded and now.bits is not None and not _comparable(recorded[key])
        ]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # and the lock goes


def _comparable(recorded: Digests) -> bool:
    return recorded.bits is not None and recorded.bits != UNKNOWN and not recorded.bits.startswith(STALE)
