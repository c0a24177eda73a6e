"""ModelProto -> Graph: names to values, node by node; every problem of a model is listed at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx.crash_report import found_bug
from rlx.errors import ModelImportError, RlxError, ShapeError, provenance
from rlx.frontend.onnx.call import Call, NeedsValue
from rlx.frontend.onnx.function import schema_function
from rlx.frontend.onnx.load import load_model, opset_versions
from rlx.frontend.onnx.order import in_order
from rlx.frontend.onnx.proto import STRING, TensorFiles, element_dtype, label_of, sparse_array
from rlx.frontend.onnx.registry import find
from rlx.frontend.onnx.sizes.data_sizes import DataSizes
from rlx.frontend.onnx.sizes.shape_eval import PartialEvaluator
from rlx.frontend.onnx.value import BROKEN, Broken, Labels, Maps, Rows, Strings, Value
from rlx.ir.attr import AttrValue
from rlx.ir.dim import Dim, evaluate, sym
from rlx.ir.dtype import ParamValue, dtype
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.ir.operand import DimLike
from rlx.ir.rewrite import copy_node, finish_rewrite, rewrite
from rlx.ir.tree import Nest
from rlx.ir.types import type_symbols
from rlx.records import dataclass

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TypeProto, ValueInfoProto

    from rlx.frontend.onnx.value import InputPlace, OutputPlace, Outputs

PARAM_BYTES = 1024
"""Constants of this size or more are params with values: weights, not part of the program text."""
MOST_PROBLEMS = 50
"""How many problems one message lists."""
MOST_NODES = 300_000
"""A model that unfolds to more nodes (functions that call functions ...) is refused: it would not end."""
MOST_BYTES = 1 << 40
"""A tensor that is known to be larger is refused while importing, not when memory runs out."""

# what a conversion of a malformed node may stumble over; anything else is a fault of RLX
_STUMBLES = (TypeError, ValueError, LookupError, ArithmeticError, MemoryError, AttributeError, RecursionError)


class TooLarge(ModelImportError):
    """A model that grows without end while it is imported; nothing more is tried."""


@dataclass
class Scope:
    """Names of one graph or function: values here, then in the graphs around it."""

    opsets: Mapping[str, int]
    parent: Scope | None = None
    values: dict[str, Value] = field(default_factory=dict)
    attributes: Mapping[str, AttributeProto] | None = None
    """Inside a function: the attributes it was called with."""

    def has(self, name: str) -> bool:
        """Whether a name has a value here or in a graph around this one."""
        return name in self.values or (self.parent is not None and self.parent.has(name))

    def lookup(self, name: str) -> Value:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        raise ModelImportError(f"it reads {name!r}, which no input, initializer or other node defines")

    def attributes_of(self, proto: NodeProto) -> Iterator[AttributeProto]:
        """Attributes of a node, with references to attributes of the function around it resolved."""
        for a in proto.attribute:
            if not a.ref_attr_name:
                yield a
            elif self.attributes is not None and a.ref_attr_name in self.attributes:
                copy = type(a)()
                copy.CopyFrom(self.attributes[a.ref_attr_name])
                copy.name = a.name
                yield copy


@dataclass
class Imported:
    """A model as a graph, and how its inputs and outputs are spread over those of the graph."""

    graph: Graph
    inputs: dict[str, InputPlace]
    outputs: dict[str, OutputPlace]
    host_ops: list[dict[str, str]]
    """Nodes whose values were computed on the host at import: text, and shapes that depend on data."""


class Importer:
    """One conversion of a model.

    `values` are inputs fixed by value; `shapes` replace declared input shapes. With `lazy`, large params stay
    in the files of the model, and are read when they are needed.
    """

    def __init__(
        self,
        model: ModelProto,
        folder: Path | None = None,
        values: Mapping[str, Nest] | None = None,
        shapes: Mapping[str, Sequence[DimLike]] | None = None,
        lazy: bool = False,
    ) -> None:
        self.model, self.folder = model, folder
        self.files = TensorFiles(folder, lazy)
        self.values, self.shapes = dict(values or {}), dict(shapes or {})
        self.graph = Graph(model.graph.name or "model")
        self.known = PartialEvaluator()
        self.data_sizes = DataSizes(self.graph, self.known)
        self.problems: list[str] = []
        self.needs: list[str] = []
        self.host_ops: list[dict[str, str]] = []
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.calling: list[tuple[str, str, str]] = []
        self._names: set[str] = set()
        self._converted = 0

    # -- the whole model

    def run(self) -> Imported:
        """Convert; refuse with every problem found."""
        top = Scope(opset_versions(self.model, self.problems))
        proto = self.model.graph
        inputs: dict[str, InputPlace] = {}
        with self.graph.building():
            self._initializers(proto, top)
            for info in proto.input:
                if info.name in inputs:
                    self.problem(f"input {info.name!r} is declared twice")
                elif info.name not in top.values:  # initializers may be listed as inputs, too
                    inputs[info.name] = self._input(info, top)
            self.nodes(proto.node, top)
            outputs, results = self._outputs(proto, top)
        if self.problems:
            self._refuse()
        for name, node in results.items():
            self.graph.output(name, node)
        return Imported(_without_dead(self.graph), inputs, outputs, self.host_ops)

    def _refuse(self) -> None:
        shown = self.problems[:MOST_PROBLEMS]
        more = len(self.problems) - len(shown)
        lines = "\n".join(f"  - {p}" for p in shown) + (f"\n  - and {more} more" if more else "")
        message = f"model {self.graph.name!r} cannot be imported:\n{lines}"
        if self.needs and len(self.needs) >= len(self.problems):
            raise NeedsValue(message, list(dict.fromkeys(self.needs)))
        raise ModelImportError(message)

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    # -- inputs and outputs

    def _input(self, info: ValueInfoProto, scope: Scope) -> InputPlace:
        """Declare a graph input; returns its place among the inputs of the graph."""
        try:
            scope.values[info.name], place = self._typed_input(
                info.name, info.type, self.values.get(info.name, ...)
            )
            return place
        except RlxError as e:
            if isinstance(e, NeedsValue):
                self.needs += e.inputs
            self.problem(f"input {info.name!r}: {e.message}")
            scope.values[info.name] = BROKEN
            return None

    def _typed_input(self, name: str, type_: TypeProto, value: AttrValue) -> tuple[Value, InputPlace]:
        kind = type_.WhichOneof("value")
        if kind == "optional_type":
            if value is None:
                return None, None
            if value is ...:
                raise NeedsValue("it is optional; say by its value whether it is there", [name])
            return self._typed_input(name, type_.optional_type.elem_type, value)
        if kind == "sequence_type":
            if value is ...:
                raise NeedsValue("it is a sequence; its length must be known", [name])
            pairs = [
                self._typed_input(f"{name}.{i}", type_.sequence_type.elem_type, v)
                for i, v in enumerate(value)
            ]
            return [v for v, _ in pairs], [p for _, p in pairs]
        if kind not in ("tensor_type", "sparse_tensor_type"):
            raise ModelImportError(
                f"its type {kind or 'unknown'} is not supported; RLX takes tensors, sequences, optionals"
            )
        return self._tensor_input(name, getattr(type_, kind), value)

    def _tensor_input(
        self, name: str, tensor: TypeProto.Tensor, value: AttrValue
    ) -> tuple[Value, InputPlace]:
        if tensor.elem_type == STRING:
            if value is ...:
                raise NeedsValue("it holds text, which is read while importing", [name])
            return Strings(np.asarray(value, dtype=object)), None
        if tensor.elem_type == 0 and value is not ...:  # a sequence may leave its element type open
            kind = dtype(np.asarray(value).dtype)
        else:
            kind = element_dtype(tensor.elem_type, "it")
        if name in self.shapes or ("." in name and value is not ...):
            shape = tuple(self.shapes.get(name, np.shape(value)))
        elif not tensor.HasField("shape"):
            raise NeedsValue("it has no shape; give one with shapes={...}", [name])
        else:
            shape = tuple(_dim(d, f"{name}.{i}") for i, d in enumerate(tensor.shape.dim))
        node = self.graph.input(name, shape, kind)
        if _is_huge(node):
            raise ModelImportError(f"its type {node.tensor} is too large; check its shape")
        if value is not ... and not isinstance(value, list):
            self.known.given[node] = np.asarray(value)
        return node, name

    def _outputs(self, proto: NodeProto, scope: Scope) -> tuple[dict[str, OutputPlace], dict[str, Node]]:
        """How outputs are spread over graph outputs, and the nodes of these."""
        nodes: dict[str, Node] = {}

        def place(name: str, value: Value) -> OutputPlace:
            if isinstance(value, Node):
                nodes[name] = value
                return name
            if isinstance(value, Strings):
                return value.array
            if isinstance(value, (Labels, Maps, Rows)):
                nodes[name] = value.numbers
                return value.output(name)
            if isinstance(value, list):
                return [place(f"{name}.{i}", v) for i, v in enumerate(value)]
            return None

        out: dict[str, OutputPlace] = {}
        for info in proto.output:
            try:
                value = scope.lookup(info.name)
            except ModelImportError:
                self.problem(f"output {info.name!r} is defined by no node")
                continue
            if not isinstance(value, Broken):
                out[info.name] = place(info.name, value)
        return out, nodes

    def _initializers(self, proto: NodeProto, scope: Scope) -> None:
        for tensor in proto.initializer:
            self._initializer(tensor.name, partial(self.files.value, tensor), scope)
        for sparse in proto.sparse_initializer:
            self._initializer(sparse.values.name, partial(sparse_array, sparse, self.folder), scope)

    def _initializer(self, name: str, read: Callable[[], ParamValue], scope: Scope) -> None:
        try:
            scope.values[name] = self.constant(read(), name)
        except (RlxError, *_STUMBLES) as e:
            self.problem(f"initializer {name!r}: {_text(e)}")
            scope.values[name] = BROKEN

    def constant(self, array: ParamValue, name: str) -> Value:
        """An array of the model as a value: text, a constant, or (1 KiB and more) a param with its value."""
        if array.dtype == object:
            return Strings(np.asarray(array))
        if array.nbytes < PARAM_BYTES:
            return self.graph.constant(np.asarray(array))
        stored = self.graph.param_values.get(name)
        if stored is not None and stored.dtype == array.dtype and np.array_equal(stored, array):
            return self.graph.params[name]  # a sub-graph that is converted again
        unique, number = name, 1
        while unique in self._names or unique in self.graph.params:
            unique, number = f"{name}_{number}", number + 1
        self._names.add(unique)
        return self.graph.param(unique, array.shape, array.dtype, array)

    # -- nodes

    def nodes(self, protos: Sequence[NodeProto], scope: Scope) -> None:
        """Convert nodes, each after what it reads; outputs of a refused one are `Broken`."""
        try:
            protos = in_order(protos, scope.has)
        except ModelImportError as e:
            self.problem(e.message)
            scope.values.update((name, BROKEN) for proto in protos for name in proto.output)
            return
        for proto in protos:
            self._converted += 1
            if self._converted > MOST_NODES:
                raise TooLarge(f"model {self.graph.name!r} unfolds to more than {MOST_NODES} nodes")
            values = self._node(proto, scope)
            for name, value in zip(proto.output, values, strict=False):
                if name and name in scope.values:
                    self.problem(f"{label_of(proto)} defines {name!r}, which is defined already")
                elif name:
                    scope.values[name] = value

    def _node(self, proto: NodeProto, scope: Scope) -> Sequence[Value]:
        broken: Sequence[Value] = [BROKEN] * len(proto.output)
        domain = "" if proto.domain == "ai.onnx" else proto.domain
        version = scope.opsets.get(domain, 1 if domain else scope.opsets.get("", 1))
        label = label_of(proto, version)
        try:
            with provenance((f"{proto.name or proto.op_type}",)):
                out = self._convert(proto, scope, domain, version)
        except TooLarge:
            raise
        except NeedsValue as e:
            self.needs += e.inputs
            self.problem(f"{label}: {e.message}")
            return broken
        except (RlxError, *_STUMBLES) as e:
            self.problem(f"{label}: {_text(e)}")
            return broken
        if out is BROKEN:
            return broken
        values = list(out) if isinstance(out, tuple) else [out]
        if sum(map(bool, proto.output[len(values) :])):
            self.problem(f"{label}: RLX gives only {len(values)} of its {len(proto.output)} outputs")
            return broken
        for value in values:
            if isinstance(value, Node) and _is_huge(value):
                self.problem(f"{label}: its result {value.tensor} is too large; check its shapes")
                return broken
        return values

    def _convert(self, proto: NodeProto, scope: Scope, domain: str, version: int) -> Outputs:
        key = (proto.domain, proto.op_type, getattr(proto, "overload", ""))
        function = self.functions.get(key)
        entry = None if function is not None else find(domain, proto.op_type, version)
        if entry is None and function is None:
            function = schema_function(proto, scope, domain, version)
            if function is None:
                raise ModelImportError(
                    "RLX does not support this op; export the model with other ops or another opset"
                )
        if any(name and isinstance(scope.lookup(name), Broken) for name in proto.input):
            return BROKEN
        if function is not None:
            return self._call_function(function, proto, scope, key)
        assert entry is not None
        call = Call(self, scope, proto, version)
        out = entry.convert(call)
        unread = call.unread(entry.ignored)
        if unread:
            raise ModelImportError(
                f"its attribute {unread[0]!r} is not supported; export the model without it"
            )
        return out

    def expand(self, call: Call) -> Outputs:
        """Convert a node by ONNX's own definition of its op, for cases that an entry leaves to it."""
        proto = call.proto
        function = schema_function(proto, call.scope, proto.domain, call.version)
        if function is None:
            raise ModelImportError(
                "this combination of inputs and attributes is not supported; export the model with another"
            )
        return self._call_function(function, proto, call.scope, (proto.domain, proto.op_type, ""))

    def _call_function(
        self, function: FunctionProto, proto: NodeProto, scope: Scope, key: tuple[str, str, str]
    ) -> Outputs:
        """Convert the nodes of a function in their own scope."""
        if key in self.calling:
            raise ModelImportError(f"function {function.name!r} calls itself")
        attributes = {a.name: a for a in function.attribute_proto}
        attributes |= {a.name: a for a in scope.attributes_of(proto)}
        opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import}
        inner = Scope({**scope.opsets, **opsets}, None, {}, attributes)
        given = [scope.lookup(name) if name else None for name in proto.input]
        for i, name in enumerate(function.input):
            inner.values[name] = given[i] if i < len(given) else None
        before = len(self.problems)
        self.calling.append(key)
        try:
            self.nodes(function.node, inner)
        finally:
            self.calling.pop()
        if len(self.problems) > before:
            return BROKEN
        wanted = [*proto.output, *[""] * (len(function.output) - len(proto.output))]
        return tuple(
            inner.lookup(name) if asked else None
            for name, asked in zip(function.output, wanted, strict=False)
        )

    def look(
        self,
        proto: NodeProto,
        nodes: Sequence[NodeProto],
        values: Mapping[str, Value],
        scope: Scope,
        name: str,
    ) -> Value:
        """One value of a sub-graph, from some of its nodes, to see what is known of it; problems are none."""
        inner = Scope(scope.opsets, scope, dict(values), scope.attributes)
        read = {name, *(i for node in nodes for i in node.input)}
        kept = len(self.problems), len(self.needs), len(self.host_ops)
        for tensor in proto.initializer:
            if tensor.name in read:
                self._initializer(tensor.name, partial(self.files.value, tensor), inner)
        self.nodes(nodes, inner)
        del self.problems[kept[0] :], self.needs[kept[1] :], self.host_ops[kept[2] :]
        return inner.lookup(name)

    def run_graph(self, proto: NodeProto, inputs: Sequence[Value], scope: Scope) -> list[Value]:
        """Convert a sub-graph into the graph being built; returns its outputs."""
        inner = Scope(scope.opsets, scope, {}, scope.attributes)
        if len(inputs) != len(proto.input):
            raise ModelImportError(f"its sub-graph takes {len(proto.input)} inputs, got {len(inputs)}")
        for info, value in zip(proto.input, inputs, strict=True):
            inner.values[info.name] = value
        self._initializers(proto, inner)
        before = len(self.problems)
        needs = len(self.needs)
        self.nodes(proto.node, inner)
        if len(self.problems) > before:
            inside, self.problems = self.problems[before:], self.problems[:before]
            wanted, self.needs = self.needs[needs:], self.needs[:needs]
            text = "inside its sub-graph: " + "; ".join(inside)
            raise NeedsValue(text, wanted) if len(wanted) >= len(inside) else ModelImportError(text)
        return [inner.lookup(info.name) for info in proto.output]


def _dim(proto: NodeProto, name: str) -> Dim:
    which = proto.WhichOneof("value")
    if which == "dim_value":
        if proto.dim_value < 0:
            return sym(name)  # some exporters write -1 for a size that is open
        return int(proto.dim_value)
    named = which == "dim_param" and proto.dim_param not in ("", "?")  # each "?" is a separate size
    return sym(proto.dim_param if named else name)


def _is_huge(node: Node) -> bool:
    """Whether a tensor has too many bytes even if every symbol is 1."""
    t = node.tensor
    try:
        return evaluate(t.nbytes, dict.fromkeys(type_symbols(t), 1)) > MOST_BYTES
    except ShapeError:  # a size that is divided by another, which is 0 there
        return False


def _text(e: BaseException) -> str:
    if isinstance(e, RlxError):
        return e.message
    what = f"{type(e).__name__}: {e}".rstrip(": ")
    return (
        f"it is not valid ({what}); check the model with onnx.checker, and if that accepts it, please report "
        "it: then it is a bug of RLX"
    )


def _without_dead(graph: Graph) -> Graph:
    """Shape arithmetic that nothing reads any more is dropped, and params with it."""
    out = rewrite(graph, lambda node, operands, into: None)
    live = out.live()
    unused = [name for name, node in out.params.items() if node.id not in live]
    if unused:
        out = _drop_params(out, set(unused))
    return out


def _drop_params(graph: Graph, unused: set[str]) -> Graph:
    out = Graph(graph.name)
    for c in graph.constraints:
        out.assume(c)
    mapping: dict[int, Node] = {}
    for node in graph.nodes:
        if node.op.role is Role.PARAM and node.attrs["name"] in unused:
            continue
        mapping[node.id] = copy_node(node, [mapping[o.id] for o in node.operands], out)
    finish_rewrite(graph, out, mapping)
    out.param_values = {k: v for k, v in graph.param_values.items() if k not in unused}
    return out


def import_model(
    model: object,
    values: Mapping[str, Nest] | None = None,
    shapes: Mapping[str, Sequence[DimLike]] | None = None,
    lazy: bool = False,
) -> Imported:
    """Import a path, bytes or ModelProto, with inputs fixed by value where shapes depend on them."""
    proto, folder = load_model(model)
    try:
        return Importer(proto, folder, values, shapes, lazy).run()
    except RlxError:
        raise
    except _STUMBLES as e:  # fields that hold bytes where a name should be, and the like
        raise ModelImportError(f"the model is damaged: {_text(e)}") from e
    except Exception as e:
        bug = found_bug("the import of an ONNX model", e, proto)
        if bug is None:
            raise
        raise bug from e
