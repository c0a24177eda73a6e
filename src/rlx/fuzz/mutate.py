"""Mutations: one or a few places of a text changed into what its reader may not expect there."""

from __future__ import annotations

import random
import re

from rlx.ir.dtype import ALL_DTYPES
from rlx.ir.op import all_ops

NUMBER = re.compile(r"(?<![\w.%])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")
ATTRIBUTES = re.compile(r"(?<=\{)(?:\w+=[^{}\n]*)(?=\})")
WORD = re.compile(r'"?[A-Za-z_][A-Za-z_0-9:]*"?')
REFERENCE = re.compile(r"%\d+")
LARGE = (64, 255, 256, 4096, 65_535, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64)


def other_number(text: str, chance: random.Random) -> str:
    """A number near another one, or far from it."""
    if not text.lstrip("-").isdecimal():
        return chance.choice(("0.0", "-1.0", "1e38", "1e-45", "nan", "inf", "-inf", "1e400", "0.5"))
    n = int(text)
    near = (n + 1, n - 1, n * 2, n // 2, -n, 0, 1, -1, 2, 3, 7, n + 64, n * 1000)
    return str(chance.choice((*near, *near, *LARGE, *(-n for n in LARGE[-4:]))))


def replaced(text: str, found: re.Match[str], new: str) -> str:
    return text[: found.start()] + new + text[found.end() :]


def change_attribute(text: str, chance: random.Random) -> str:
    """Any number, or word, among the attributes of any op."""
    groups = list(ATTRIBUTES.finditer(text))
    if not groups:
        return change_number(text, chance)
    group = chance.choice(groups)
    inner = group[0]
    changed = change_number(inner, chance) if chance.random() < 0.75 else change_word(inner, chance)
    return text[: group.start()] + changed + text[group.end() :]


def change_number(text: str, chance: random.Random) -> str:
    found = list(NUMBER.finditer(text))
    if not found:
        return text
    place = chance.choice(found)
    return replaced(text, place, other_number(place[0], chance))


def change_word(text: str, chance: random.Random) -> str:
    """A word becomes another one of the text, an op or a dtype."""
    found = list(WORD.finditer(text))
    if not found:
        return text
    words = [m[0] for m in found]
    new = chance.choice(
        (chance.choice(words), chance.choice(all_ops()).name, chance.choice(sorted(map(str, ALL_DTYPES))))
    )
    return replaced(text, chance.choice(found), new)


def change_reference(text: str, chance: random.Random) -> str:
    found = list(REFERENCE.finditer(text))
    if not found:
        return text
    return replaced(text, chance.choice(found), chance.choice(found)[0])


def change_line(text: str, chance: random.Random) -> str:
    """A line is lost, repeated, or trades places with another."""
    lines = text.splitlines()
    if len(lines) < 2:
        return change_number(text, chance)
    a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
    kind = chance.choice(("lost", "twice", "traded"))
    if kind == "lost":
        del lines[a]
    elif kind == "twice":
        lines.insert(b, lines[a])
    else:
        lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines) + "\n"


KINDS = (
    change_attribute,
    change_attribute,
    change_attribute,
    change_number,
    change_number,
    change_word,
    change_reference,
    change_line,
)


def mutated(text: str, chance: random.Random) -> str:
    """A text with one to three changes; never the same text, if anything in it can be changed."""
    new = text
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        new = chance.choice(KINDS)(new, chance)
    for _ in range(8):
        if new != text:
            break
        new = change_number(text, chance)
    return new
