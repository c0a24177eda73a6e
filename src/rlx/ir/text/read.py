"""Reading the text of a graph: the inverse of `rlx.ir.text.write`.

Every node is typed again by its op's rule, and the type that is written must agree. Whatever the text,
the answer is a graph or a `ParseError` that names line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar, overload

import numpy as np

from rlx.errors import ParseError, RlxError
from rlx.ir.attr import Blob
from rlx.ir.dim import Constraint, Dim, Expr, Sym, parse_dim, sym
from rlx.ir.dtype import dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Op, get_op
from rlx.ir.text.arrays import read_elements
from rlx.ir.types import TensorType, TupleType, Type, parse_type

_SPACE = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*+")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"')
_NODE = re.compile(r"%[0-9]{1,12}")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)(?![A-Za-z0-9_.])")
_INTEGER = re.compile(r"[0-9]{1,18}")
_NAME = r"`(?:[^`\\]|\\.)++`"
_SYMBOL = re.compile(rf"[A-Za-z_][A-Za-z0-9_]*+|{_NAME}", re.DOTALL)
_DIM = re.compile(rf"\{{((?:[^{{}}`]++|{_NAME})*+)\}}", re.DOTALL)
_TYPE = re.compile(rf"[a-z][a-z0-9]*+\[(?:[^\[\]`]++|{_NAME})*+\]", re.DOTALL)
_ELEMENTS = re.compile(r"\{([^{}]*+)\}")
_BLOB = re.compile(r"blob:([0-9a-f]{64})")
_WORD_VALUES = {"none": None, "true": True, "false": False}
_MAX_NESTING = 64

T = TypeVar("T")


def parse_graph(text: str, blobs: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph that `graph_text` wrote; `blobs` holds the large arrays by digest.

    >>> g = parse_graph('''
    ... graph "hello" {
    ...   %0 = input() {name="x", type=f32[2,n]}   # the type after the braces may be left out
    ...   %1 = exp(%0) : f32[2,n]
    ...   output "y" = %1
    ... }''')
    >>> g.outputs["y"]
    %1 = exp(%0) : f32[2,n]
    """
    reader = GraphReader(text, blobs)
    graph = reader.graph()
    reader.end()
    return graph


def parse_foreign(
    text: str, blobs: Mapping[str, np.ndarray] | None = None, custom: Collection[str] | None = ()
) -> Graph:
    """The graph of a text that somebody else may have written.

    It holds no storage layouts, which are the compiler's own, and calls no function of the user's but those
    that `custom` names (None: any). Both are refused before any rule of the op sees the attributes.
    """
    reader = ForeignReader(text, blobs, custom)
    graph = reader.graph()
    reader.end()
    return graph


def read_signed(text: str, blobs: Mapping[str, np.ndarray] | None = None) -> Graph:
    """The graph of a text that `graph_text` wrote and whose signature was verified: read, not checked."""
    reader = SignedReader(text, blobs)
    graph = reader.graph()
    reader.end()
    return graph


class Reader:
    """A place in a text; every complaint names line and column."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.skip()

    def fail(self, why: str, at: int | None = None) -> NoReturn:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        column = at - (self.text.rfind("\n", 0, at) + 1) + 1
        raise ParseError(why, (f"line {line}, column {column}",))

    def expected(self, what: str) -> NoReturn:
        found = self.text[self.at : self.at + 20].partition("\n")[0]
        self.fail(f"expected {what}, " + (f"found {found!r}" if found else "but the text ends here"))

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        assert match is not None, "the pattern matches nothing too"
        self.at = match.end()

    def accept(self, literal: str) -> bool:
        """Take `literal` if it comes next."""
        if not self.text.startswith(literal, self.at):
            return False
        self.at += len(literal)
        self.skip()
        return True

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            self.expected(repr(literal))

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Take what matches, if it comes next."""
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            self.skip()
        return found

    def take(self, pattern: re.Pattern[str], what: str) -> str:
        found = self.match(pattern)
        if found is None:
            self.expected(what)
        return found[0]

    def listed(self, read: Callable[[], T]) -> list[T]:
        """One or more of what `read` reads, with commas between."""
        found = [read()]
        while self.accept(","):
            found.append(read())
        return found

    def string(self) -> str:
        start = self.at
        text = self.take(_STRING, "a string in double quotes")
        try:
            value: str = json.loads(text)
        except ValueError:
            self.fail(f"{text[:40]} is not a string; backslashes must be escaped as in JSON", start)
        return value

    def end(self) -> None:
        if self.at < len(self.text):
            self.expected("the end of the text")


class _Parts(NamedTuple):
    """A node as it is written; its type may be left out."""

    op: Op
    operands: Sequence[Node]
    attrs: Mapping[str, object]
    bodies: Sequence[Graph]
    where: tuple[str, ...]
    type: Type | None


class GraphReader(Reader):
    """Reads graphs, types and attribute values; symbols and types read once are shared."""

    def __init__(self, text: str, blobs: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__(text)
        self.blobs = blobs
        self.symbols: dict[str, Expr] = {}
        self.nesting = 0
        self._types: dict[str, TensorType] = {}

    def guarded(self, start: int, make: Callable[[], T]) -> T:
        """What `make` gives; its refusal becomes a ParseError at `start`."""
        try:
            return make()
        except RlxError as e:
            self.fail(e.message, start)
        except Exception as e:  # an attribute that passes its kind but that a rule of its op did not think of
            self.fail(f"not accepted ({type(e).__name__}: {e})", start)

    def deeper(self, read: Callable[[], T]) -> T:
        """Run a reader one level down; hostile texts nest without end."""
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            self.fail(f"nested more than {_MAX_NESTING} deep")
        value = read()
        self.nesting -= 1
        return value

    # -- graphs

    def graph(self) -> Graph:
        """A whole graph, from the word `graph` to its closing brace."""
        self.expect("graph")
        graph = Graph(self.string())
        self.expect("{")
        values: dict[str, Node] = {}
        while not self.accept("}"):
            if self.text.startswith("%", self.at):
                self.node(graph, values)
            else:
                self.statement(graph, values)
        return graph

    def statement(self, graph: Graph, values: Mapping[str, Node]) -> None:
        start = self.at
        word = self.match(_WORD)
        match word and word[0]:
            case "symbol":
                if graph.nodes or graph.constraints or self.nesting:
                    self.fail("symbols are declared before everything else in the outermost graph", start)
                self.symbol()
            case "assume":
                kind = self.take(_WORD, "a kind of assumption")
                lhs = self.dim()
                self.expect(",")
                rhs, where = self.dim(), self.where()
                self.guarded(start, lambda: graph.assume(Constraint(kind, lhs, rhs, where)))
            case "inputs":
                self.inputs(graph, values, start)
            case "output":
                name, node = self.named(values)
                self.guarded(start, lambda: graph.output(name, node))
            case "state":
                name, node = self.named(values)
                self.guarded(start, lambda: graph.set_state(name, node))
            case _:
                self.at = start
                self.expected("a node, symbol, assume, inputs, output, state or '}'")

    def symbol(self) -> None:
        start = self.at
        text = self.take(_SYMBOL, "the name of a symbol")
        made = self.guarded(start, lambda: parse_dim(text))
        assert isinstance(made, Expr) and isinstance(made.atom, Sym), "the pattern admits nothing else"
        name = made.atom.name
        self.expect("in")
        low = int(self.take(_INTEGER, "the least value of the symbol"))
        self.expect("..")
        high = self.match(_INTEGER)
        if name in self.symbols:
            self.fail(f"symbol {text} is declared twice", start)
        most = None if high is None else int(high[0])
        self.symbols[name] = self.guarded(start, lambda: sym(name, low, most))

    def inputs(self, graph: Graph, values: Mapping[str, Node], start: int) -> None:
        order = self.listed(lambda: self.operand(values))
        if sorted(n.id for n in order) != [n.id for n in graph.inputs]:
            self.fail("the list of inputs must name every input of the graph once", start)
        graph.inputs = order

    def named(self, values: Mapping[str, Node]) -> tuple[str, Node]:
        name = self.string()
        self.expect("=")
        return name, self.operand(values)

    def operand(self, values: Mapping[str, Node]) -> Node:
        start = self.at
        name = self.take(_NODE, "a node such as %0")
        if name not in values:
            self.fail(f"{name} is not defined above", start)
        return values[name]

    def node(self, graph: Graph, values: dict[str, Node]) -> None:
        start = self.at
        name = self.take(_NODE, "a node such as %0")
        if name in values:
            self.fail(f"{name} is defined twice", start)
        self.expect("=")
        at_op = self.at
        word = self.take(_WORD, "the name of an op")
        op: Op = self.guarded(at_op, lambda: get_op(word))
        self.expect("(")
        operands = [] if self.accept(")") else self.operands(values)
        attrs = self.attributes(op) if self.accept("{") else {}
        self.admit(op, attrs, at_op)
        at_type = self.at
        written = self.type() if self.accept(":") else None
        where = self.where()
        bodies = self.bodies() if self.accept("{") else ()
        parts = _Parts(op, operands, attrs, bodies, where, written)
        made: Node = self.guarded(at_op, lambda: self.made(graph, parts))
        if written is not None and written != made.type:
            self.fail(f"{name} ({op.name}) is written as {written}, but its type is {made.type}", at_type)
        values[name] = made

    def admit(self, op: Op, attrs: Mapping[str, object], at: int) -> None:
        """Refuse an op that such a text must not have; the compiler's own texts have them all."""

    def bodies(self) -> Sequence[Graph]:
        found: list[Graph] = []
        while not self.accept("}"):
            found.append(self.deeper(self.graph))
        return found

    def made(self, graph: Graph, parts: _Parts) -> Node:
        """The node; its type is inferred, whatever is written."""
        return graph.add(parts.op, parts.operands, parts.attrs, parts.bodies, parts.where)

    def operands(self, values: Mapping[str, Node]) -> list[Node]:
        found = [self.operand(values)]
        while not self.accept(")"):
            self.expect(",")
            found.append(self.operand(values))
        return found

    def attributes(self, op: Op) -> dict[str, object]:
        found: dict[str, object] = {}
        while True:
            start = self.at
            key = self.take(_WORD, f"an attribute of {op.name}")
            if key in found:
                self.fail(f"{op.name}: attribute {key!r} is written twice", start)
            self.expect("=")
            found[key] = self.value()
            if self.accept("}"):
                return found
            self.expect(",")

    def where(self) -> tuple[str, ...]:
        return tuple(self.listed(self.string)) if self.accept("@") else ()

    # -- types and values

    def type(self) -> Type:
        if not self.accept("("):
            return self.tensor_type()
        items: list[TensorType] = []
        while not self.accept(")"):
            if items:
                self.expect(",")
            items.append(self.tensor_type())
        return TupleType(tuple(items))

    def tensor_type(self) -> TensorType:
        start = self.at
        text = self.take(_TYPE, "a type such as f32[2,n]")
        found = self._types.get(text)
        if found is None:
            found = self._types[text] = self.guarded(start, lambda: parse_type(text, self.symbols))
        return found

    def dim(self) -> Dim:
        """A size: a number, or an expression in braces."""
        start = self.at
        braces = self.match(_DIM)
        if braces is not None:
            found: Dim = self.guarded(start, lambda: parse_dim(braces[1], self.symbols))
            return found
        value = self.number()
        if not isinstance(value, int):
            self.fail("a size is a whole number or an expression in braces such as {2*n}", start)
        return value

    def number(self) -> int | float:
        start = self.at
        text = self.take(_NUMBER, "a value")
        if any(c in text for c in ".en"):
            return float(text)
        if len(text) > 1000:
            self.fail("a number has more than 1000 digits", start)
        return int(text)

    def value(self) -> object:
        """An attribute value: its spelling says what kind it is."""
        first = self.text[self.at : self.at + 1]
        if first == '"':
            return self.string()
        if first == "{":
            return self.dim()
        if first == "(":
            self.expect("(")
            return self.deeper(self.items)
        if not first.isalpha():
            return self.number()
        blob = self.match(_BLOB)
        if blob is not None:
            return self.blob(blob[1], blob.start())
        if _TYPE.match(self.text, self.at):
            return self.type_or_array()
        if _NUMBER.match(self.text, self.at):
            return self.number()
        start = self.at
        word = self.take(_WORD, "a value")
        return _WORD_VALUES[word] if word in _WORD_VALUES else self.guarded(start, lambda: dtype(word))

    def items(self) -> tuple[object, ...]:
        found: list[object] = []
        while not self.accept(")"):
            found.append(self.value())
            if not self.accept(","):
                self.expect(")")
                break
        return tuple(found)

    def type_or_array(self) -> TensorType | Blob:
        start = self.at
        found = self.tensor_type()
        if not self.text.startswith("{", self.at):
            return found
        elements = self.match(_ELEMENTS)
        if elements is None:
            self.expected("the elements of an array in braces")
        if not found.is_static:
            self.fail(f"an array of {found} cannot be written: its shape is not known", start)
        texts = [t.strip() for t in elements[1].split(",")] if elements[1].strip() else []
        shape = found.bind({})
        made: Blob = self.guarded(start, lambda: Blob(read_elements(texts, found.dtype, shape)))
        return made

    def blob(self, digest: str, start: int) -> Blob:
        if self.blobs is None or digest not in self.blobs:
            self.fail(f"blob:{digest[:12]}... is not among the blobs given with the text", start)
        found = self.blobs[digest]
        made: Blob = self.guarded(start, lambda: Blob(found))
        if self.guarded(start, lambda: made.digest) != digest:
            self.fail(f"blob:{digest[:12]}... has another content than its digest says; it is damaged", start)
        return made


class ForeignReader(GraphReader):
    """Reads texts that come from outside."""

    def __init__(
        self, text: str, blobs: Mapping[str, np.ndarray] | None = None, custom: Collection[str] | None = ()
    ) -> None:
        super().__init__(text, blobs)
        self.custom = custom

    def admit(self, op: Op, attrs: Mapping[str, object], at: int) -> None:
        if op.storage:
            self.fail(
                f"{op.name} is a storage layout, which only the compiler may choose; "
                "write the graph without it",
                at,
            )
        if op.user_function is None or self.custom is None:
            return
        called = attrs.get(op.user_function)
        if called not in self.custom:
            self.fail(
                f"the file calls the custom op {str(called)[:80]!r}; if it may, pass custom=[{called!r:.80}]",
                at,
            )


class SignedReader(GraphReader):
    """Reads texts that are sound for certain: types are taken as written, bodies read lazily."""

    def bodies(self) -> Sequence[Graph]:
        end = self.text.index("\n  }\n", self.at)  # lines of a body are indented further
        found = _LaterBodies(self, self.text[self.at : end])
        self.at = end
        self.skip()
        self.expect("}")
        return found

    def made(self, graph: Graph, parts: _Parts) -> Node:
        if parts.type is None:
            return super().made(graph, parts)
        return graph.add_typed(parts.op, parts.operands, parts.attrs, parts.bodies, parts.type, parts.where)


class _LaterBodies(Sequence[Graph]):
    """Bodies of a node as text, until somebody looks at them."""

    def __init__(self, outer: GraphReader, text: str) -> None:
        self._outer, self._text = outer, text
        self._graphs: list[Graph] | None = None

    @property
    def graphs(self) -> list[Graph]:
        if self._graphs is None:
            reader = GraphReader(self._text, self._outer.blobs)
            reader.symbols, self._graphs = self._outer.symbols, []
            while reader.at < len(reader.text):
                self._graphs.append(reader.deeper(reader.graph))
        return self._graphs

    @overload
    def __getitem__(self, index: int) -> Graph: ...

    @overload
    def __getitem__(self, index: slice) -> list[Graph]: ...

    def __getitem__(self, index: int | slice) -> Graph | list[Graph]:
        return self.graphs[index]

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self.graphs)

    def __bool__(self) -> bool:
        return True  # there is a text, so there is a body
