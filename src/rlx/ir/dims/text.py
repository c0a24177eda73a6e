"""Reading symbolic sizes: the inverse of `str(dim)`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NoReturn

from rlx.errors import ParseError, ShapeError
from rlx.ir.dims.bounds import dim_max, dim_min
from rlx.ir.dims.expr import Dim, Expr, ceildiv, floordiv, mod, sym

_TOKEN = re.compile(r"\s*([0-9]+|[A-Za-z_][A-Za-z0-9_]*|`(?:[^`\\]|\\.)+`|\*\*|//|[-+*%(),])", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r"}
_FUNCTIONS: Mapping[str, Callable[..., Dim]] = {"ceildiv": ceildiv, "min": dim_min, "max": dim_max}
_MAX_NESTING = 100
_MAX_POWER = 1000
_MAX_DIGITS = 1000


def parse_dim(text: str, symbols: Mapping[str, Expr] | None = None) -> Dim:
    """The dim that `text` says: the inverse of `str`. Names other than plain identifiers stand in backticks.

    `symbols` gives the symbol for some names, where their bounds matter.

    >>> parse_dim("2*seq+1"), parse_dim("`batch size`//4"), parse_dim("7")
    (2*seq+1, `batch size`//4, 7)
    """
    return _Parser(text, symbols or {}).parse()


class _Parser:
    """Recursive descent with the precedence of Python."""

    def __init__(self, text: str, symbols: Mapping[str, Expr]) -> None:
        self.text = text
        self.symbols = symbols
        self.tokens = self._tokens()
        self.at = 0
        self.nesting = 0

    def _tokens(self) -> list[str]:
        found, end = [], 0
        stop = len(self.text.rstrip())
        while end < stop:
            match = _TOKEN.match(self.text, end)
            if match is None:
                self.fail(f"{self.text[end:].strip()[:20]!r} is not understood")
            found.append(match[1])
            end = match.end()
        return found

    def fail(self, why: str) -> NoReturn:
        shown = self.text if len(self.text) <= 100 else self.text[:97] + "..."
        raise ParseError(f"cannot read the size {shown!r}: {why}")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            self.fail(f"{token!r} is missing")

    def parse(self) -> Dim:
        try:
            result = self.sum()
        except ShapeError as error:
            self.fail(error.message)
        if self.peek():
            self.fail(f"{self.peek()!r} is not expected there")
        return result

    def sum(self) -> Dim:
        result = self.product()
        while self.peek() in ("+", "-"):
            result = result + self.product() if self.take() == "+" else result - self.product()
        return result

    def product(self) -> Dim:
        result = self.factor()
        while self.peek() in ("*", "//", "%"):
            operator, other = self.take(), self.factor()
            if operator == "*":
                result = result * other
            else:
                result = floordiv(result, other) if operator == "//" else mod(result, other)
        return result

    def factor(self) -> Dim:
        sign = 1
        while self.peek() in ("-", "+"):
            sign = -sign if self.take() == "-" else sign
        base = self.primary()
        if self.peek() == "**":
            self.take()
            power = self.take()
            if not power.isdecimal() or len(power) > _MAX_DIGITS or int(power) > _MAX_POWER:
                self.fail(f"a power must be a number up to {_MAX_POWER}, not {power[:20]!r}")
            if isinstance(base, int) or base.atom is None:
                self.fail("only a symbol or a function can be raised to a power")
            base = base ** int(power)
        return base * sign

    def primary(self) -> Dim:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            self.fail(f"it is nested more than {_MAX_NESTING} deep")
        token = self.take()
        if token.isdecimal():
            if len(token) > _MAX_DIGITS:
                self.fail(f"a number has more than {_MAX_DIGITS} digits")
            result: Dim = int(token)
        elif token == "(":
            result = self.sum()
            self.expect(")")
        elif token in _FUNCTIONS and self.peek() == "(":
            result = self.call(token)
        elif token[:1] == "`":
            result = self.symbol(_ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), token[1:-1]))
        elif token.isidentifier():
            result = self.symbol(token)
        else:
            self.fail(f"{token!r} is not expected there" if token else "it ends too early")
        self.nesting -= 1
        return result

    def call(self, name: str) -> Dim:
        self.expect("(")
        args = [self.sum()]
        while self.peek() == ",":
            self.take()
            args.append(self.sum())
        self.expect(")")
        if name == "ceildiv" and len(args) != 2:
            self.fail("ceildiv takes two sizes")
        return _FUNCTIONS[name](*args)

    def symbol(self, name: str) -> Expr:
        return self.symbols[name] if name in self.symbols else sym(name)
