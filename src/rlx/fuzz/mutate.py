"""Mutations: one or a few places of a text changed into what its reader may not expect there."""

from __future__ import annotations

import random
import re
from typing import Any

from rlx.ir.dtype import ALL_DTYPES
from rlx.ir.op import Op, all_ops

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


# -- attributes of one op, one after the other


def attribute_of(op: Op, text: str, number: int, chance: random.Random) -> str:
    """The text of a graph in which one attribute of `op` has another value; the numbers go through all of its
    attributes, those too that have their default and are not written.

    >>> from rlx.ir.op import get_op
    >>> text = 'graph "g" { %1 = reduce_sum(%0) {axes=(0,)} : f32[] }'
    >>> made = attribute_of(get_op("reduce_sum"), text, 0, random.Random(3))
    >>> made.startswith('graph "g" { %1 = reduce_sum(%0) {axes='), "(0,)" in made
    (True, False)
    """
    place = re.search(rf"= {re.escape(op.name)}\([^)]*\)( \{{)?", text)
    if place is None or not op.attrs:
        return mutated(text, chance)
    name = list(op.attrs)[number % len(op.attrs)]
    if place[1] is None:
        written, start, end = dict[str, str](), place.end(), place.end()
    else:
        start, end = place.end() - 2, _closing(text, place.end() - 1)
        written = dict(part.strip().split("=", 1) for part in _split(text[place.end() : end - 1]))
    # A type that is written fixes what the op gives: without it, only the op itself can refuse.
    rest = re.sub(r"\A : [^\n@{}]*", "", text[end:]) if chance.random() < 0.7 else text[end:]
    written[name] = other_value(written.get(name) or value_text(op.attrs[name].default), chance)
    inner = ", ".join(f"{k}={v}" for k, v in written.items())
    return f"{text[:start].rstrip()} {{{inner}}}{rest}"


def value_text(value: Any) -> str:
    """An attribute as graphs are written; where there is none, something to start from."""
    if isinstance(value, (tuple, list)):
        return "(" + "".join(f"{value_text(v)}, " for v in value) + ")"
    if isinstance(value, str):
        return f'"{value}"'
    return {True: "true", False: "false", None: "none"}.get(value, str(value)) if _plain(value) else "1"


def _plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def other_value(text: str, chance: random.Random) -> str:
    """A value of the same kind, now and then of another one."""
    kind = chance.random()
    if kind < 0.08:
        return chance.choice(('"x"', "none", "true", "(1, 2)", "()", "f32", "{n}", "-1", "3"))
    if text in ("true", "false"):
        return {"true": "false", "false": "true"}[text]
    if text == "none":
        return chance.choice(("0", "1", "-1", "(0,)", '"x"', "2.5"))
    if text.startswith("(") and kind < 0.25:
        items = _split(text[1:-1])
        if items and chance.random() < 0.5:
            del items[chance.randrange(len(items))]
        else:
            items.insert(chance.randrange(len(items) + 1), chance.choice([*items, "1"]))
        return "(" + "".join(f"{i.strip()}, " for i in items) + ")"
    changed = change_number(text, chance)
    return changed if changed != text else change_word(text, chance)


def _split(text: str) -> list[str]:
    """The parts of a list at its commas, those inside brackets and texts excepted."""
    parts, depth, start, quoted = list[str](), 0, 0, False
    for at, c in enumerate(text):
        if c == '"' and text[at - 1 : at] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if c == "," and not depth:
                parts.append(text[start:at])
                start = at + 1
    return [p for p in (*parts, text[start:]) if p.strip()]


def _closing(text: str, at: int) -> int:
    """Behind the brace that closes the one at a place."""
    depth, quoted = 0, False
    while True:
        c = text[at]
        if c == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c == "{") - (c == "}")
        at += 1
        if not depth:
            return at
