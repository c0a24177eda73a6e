"""Ops that ONNX itself defines by other ops: where RLX has no entry, the body of the schema is converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlx.frontend.onnx.load import onnx_package
from rlx.frontend.onnx.proto import NUMBERS, STRING
from rlx.frontend.onnx.value import Strings, Value
from rlx.ir.graph import Node

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto, TypeProto

    from rlx.frontend.onnx.importer import Scope


def schema_function(proto: NodeProto, scope: Scope, domain: str, version: int) -> FunctionProto | None:
    """The FunctionProto that ONNX gives as the meaning of a node, or None."""
    onnx = onnx_package()
    try:
        schema = onnx.defs.get_schema(proto.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        function = onnx.FunctionProto()
        function.CopyFrom(schema.function_body)
        given = [a.default_value for a in schema.attributes.values() if a.default_value.type]
        function.attribute_proto.extend(given)
        return function
    if not schema.has_context_dependent_function:
        return None
    node = type(proto)()
    node.CopyFrom(proto)
    del node.attribute[:]
    node.attribute.extend(scope.attributes_of(proto))
    types = [_type_proto(scope.lookup(name) if name else None) for name in proto.input]
    made = schema.get_context_dependent_function_with_opset_version(
        _best_version(schema, version), node.SerializeToString(), [t.SerializeToString() for t in types]
    )
    function = onnx.FunctionProto()
    function.ParseFromString(made)
    return function


def _best_version(schema: Any, version: int) -> int:
    """The opset that a function is written for which is nearest below the model's."""
    fitting = [v for v in schema.context_dependent_function_opset_versions if v <= version]
    return max(fitting, default=schema.since_version)


def _type_proto(value: Value) -> TypeProto:
    """The type of a value, for functions that look at it."""
    onnx = onnx_package()
    if isinstance(value, Node):
        dims = [d if isinstance(d, int) else str(d) for d in value.shape]
        return onnx.helper.make_tensor_type_proto(NUMBERS[value.dtype], dims)
    if isinstance(value, Strings):
        return onnx.helper.make_tensor_type_proto(STRING, list(value.shape))
    if isinstance(value, list) and value:
        return onnx.helper.make_sequence_type_proto(_type_proto(value[0]))
    return onnx.TypeProto()
