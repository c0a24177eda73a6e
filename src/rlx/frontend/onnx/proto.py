"""From ONNX's protobuf messages to NumPy arrays, dtypes and Python values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import DTypeError, ModelImportError
from rlx.frontend.onnx.lazy_weights import IDENTITY, KeptFile
from rlx.ir.attr import AttrValue
from rlx.ir.dtype import DType, LazyArray, ParamValue, dtype, unpack

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto, TensorProto


# numbers of TensorProto.DataType
DTYPES: dict[int, DType] = {
    number: dtype(name)
    for number, name in {
        1: "f32", 2: "u8", 3: "i8", 4: "u16", 5: "i16", 6: "i32", 7: "i64", 9: "bool", 10: "f16", 11: "f64",
        12: "u32", 13: "u64", 14: "c64", 15: "c128", 16: "bf16", 17: "f8e4m3fn", 18: "f8e4m3fnuz",
        19: "f8e5m2", 20: "f8e5m2fnuz", 21: "u4", 22: "i4", 23: "f4e2m1", 24: "f8e8m0", 25: "u2", 26: "i2",
    }.items()
}  # fmt: skip
NUMBERS = {d: n for n, d in DTYPES.items()}
STRING = 8

MOST_DENSE = 1 << 28
"""Elements up to which a sparse tensor is stored densely."""


def label_of(proto: NodeProto, version: int | None = None) -> str:
    """A node, for messages."""
    name = proto.name or next((o for o in proto.output if o), "")
    return f"node {name!r} ({proto.op_type}{'' if version is None else f', opset {version}'})"


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """Graphs among the attributes of a node."""
    return [g for a in node.attribute for g in ((a.g,) if a.type == a.GRAPH else a.graphs)]


def names_read(graph: GraphProto) -> set[str]:
    """Names that nodes of a graph read, and those of sub-graphs inside it, of which some are results."""
    found: set[str] = set()
    for node in graph.node:
        found.update(node.input)
        for inner in subgraphs(node):
            found |= names_read(inner) | {info.name for info in inner.output}
    return found


def element_dtype(number: int, what: str) -> DType:
    """The dtype of an ONNX element type."""
    if number not in DTYPES:
        raise DTypeError(f"{what} has ONNX element type {number}, which RLX does not have")
    return DTYPES[number]


class TensorFiles:
    """Where external data of a model is. `lazy` tensors stay in files that are kept open."""

    def __init__(self, folder: Path | None, lazy: bool = False) -> None:
        self.folder, self.lazy = folder, lazy
        self._kept: dict[Path, KeptFile] = {}

    def value(self, tensor: TensorProto) -> ParamValue:
        """The value of a tensor."""
        if not self.lazy or tensor.data_location != 1 or tensor.data_type == STRING:
            return tensor_array(tensor, self.folder)
        shape, count = _sizes(tensor)
        kind = element_dtype(tensor.data_type, f"tensor {tensor.name!r}")
        nbytes = kind.nbytes(count)
        file, offset, length = _external(tensor, nbytes, self.folder, self._kept)
        _check_length(tensor, kind, nbytes, length)

        def part(start: int, stop: int) -> np.ndarray:
            first, size = offset + kind.nbytes(start), kind.nbytes(stop - start)
            return unpack(file.read(first, size), kind, stop - start, copy=False)

        whole_bytes = kind.bits >= 8
        return LazyArray(
            kind, shape, lambda: part(0, count).reshape(shape), part=part if whole_bytes else None
        )


def tensor_array(tensor: TensorProto, folder: Path | None = None) -> np.ndarray:
    """The array of a TensorProto; strings as an object array of str. External data is in `folder`."""
    name = tensor.name or "a tensor"
    shape, count = _sizes(tensor)
    if tensor.data_type == STRING:
        return _checked(_strings(tensor.string_data), count, shape, name)
    kind = element_dtype(tensor.data_type, f"tensor {name!r}")
    if tensor.data_location == 1:
        file, offset, length = _external(tensor, kind.nbytes(count), folder, {})
        raw: bytes | np.ndarray = file.read(offset, length)
    elif tensor.HasField("raw_data"):
        raw = tensor.raw_data
    else:
        return _checked(_typed_field(tensor, kind, count), count, shape, name)
    _check_length(tensor, kind, kind.nbytes(count), len(raw))
    return unpack(raw, kind, count, copy=isinstance(raw, bytes)).reshape(shape)


def _sizes(tensor: TensorProto) -> tuple[tuple[int, ...], int]:
    """The shape of a tensor, and how many elements that are."""
    shape = tuple(int(d) for d in tensor.dims)
    if any(d < 0 for d in shape):
        name = tensor.name or "a tensor"
        raise ModelImportError(f"tensor {name!r} has a negative size in its shape {list(shape)}")
    return shape, math.prod(shape)


def _check_length(tensor: TensorProto, kind: DType, nbytes: int, found: int) -> None:
    if found != nbytes:
        raise ModelImportError(
            f"tensor {tensor.name or 'a tensor'!r} is {kind}{list(tensor.dims)}, {nbytes} bytes, but holds "
            f"{found}; the file is damaged"
        )


def _strings(items: Iterable[bytes]) -> np.ndarray:
    return np.array([s.decode("utf-8", "replace") for s in items] or [], dtype=object)


def _checked(array: np.ndarray, count: int, shape: tuple[int, ...], name: str) -> np.ndarray:
    if array.size != count:
        raise ModelImportError(
            f"tensor {name!r} has shape {list(shape)}, {count} elements, but holds {array.size}; "
            "the file is damaged"
        )
    return array.reshape(shape)


def _typed_field(tensor: TensorProto, kind: DType, count: int) -> np.ndarray:
    """Elements from the field of the tensor's own type."""
    if kind.name in ("f32", "c64"):
        flat = np.array(tensor.float_data, np.float32)
        return flat.view(np.complex64) if kind.is_complex else flat
    if kind.name in ("f64", "c128"):
        flat = np.array(tensor.double_data, np.float64)
        return flat.view(np.complex128) if kind.is_complex else flat
    if kind.name == "i64":
        return np.array(tensor.int64_data, np.int64)
    if kind.name in ("u32", "u64"):
        return np.array(tensor.uint64_data, np.uint64).astype(kind.np)
    items = np.array(tensor.int32_data, np.int32)
    if kind.bits < 8:  # packed pairs, one byte in each int32
        return unpack(items.astype(np.uint8), kind, count) if items.size == kind.nbytes(count) else items
    if kind.is_float:
        return items.astype(np.uint16 if kind.bits == 16 else np.uint8).view(kind.np)
    return items.astype(kind.np)


def _external(
    tensor: TensorProto, nbytes: int, folder: Path | None, kept: dict[Path, KeptFile]
) -> tuple[KeptFile, int, int]:
    """Where a tensor is in a file next to the model: first byte, and how many. They are to be read: a mapped
    file may be cut. `kept` has the files that are open."""
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if folder is None:
        raise ModelImportError(
            f"tensor {tensor.name!r} keeps its data in the file {location!r}; give from_onnx the path of the "
            "model, so that RLX knows where to look"
        )
    path = (folder / location).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ModelImportError(f"tensor {tensor.name!r} points outside the folder of the model: {location!r}")
    offset, length = (_whole(tensor, entries, key) for key in ("offset", "length"))
    length = length or nbytes
    if not path.is_file():
        raise ModelImportError(f"tensor {tensor.name!r} needs the file {str(path)!r}, which is not there")
    if path not in kept:
        kept[path] = KeptFile(path)
    file = kept[path]
    if IDENTITY in entries:  # the model's own file
        if entries[IDENTITY] != file.identity:
            raise ModelImportError(f"the file {str(path)!r} has changed while it was read; load it again")
    elif length != nbytes or offset < 0 or file.size < offset + nbytes:
        raise ModelImportError(
            f"tensor {tensor.name!r} takes {nbytes} bytes at {offset} of {str(path)!r}, which has "
            f"{file.size} bytes and an entry of {length}; the files do not belong together"
        )
    return file, offset, length


def _whole(tensor: TensorProto, entries: dict[str, str], key: str) -> int:
    text = entries.get(key) or "0"
    if not text.isdecimal() or len(text) > 20:
        raise ModelImportError(
            f"tensor {tensor.name!r} has {key} {text[:40]!r}, which is not a number of bytes"
        )
    return int(text)


def sparse_array(sparse: SparseTensorProto, folder: Path | None) -> np.ndarray:
    """A SparseTensorProto as a dense array."""
    values, indices = tensor_array(sparse.values, folder), tensor_array(sparse.indices, folder)
    shape = tuple(int(d) for d in sparse.dims)
    count = 1
    for d in shape:
        count *= max(d, 0)
    if not shape or min(shape) < 0 or count > MOST_DENSE:
        raise ModelImportError(
            f"sparse tensor {sparse.values.name!r} of {list(shape)} cannot be stored densely"
        )
    out = np.zeros(shape, values.dtype)
    try:
        if indices.ndim == 1:
            out.reshape(-1)[indices] = values
        else:
            out[tuple(indices.T)] = values
    except (IndexError, ValueError) as e:
        raise ModelImportError(
            f"sparse tensor {sparse.values.name!r} has indices outside {list(shape)}"
        ) from e
    return out


def attribute_value(attribute: AttributeProto, folder: Path | None = None) -> AttrValue:
    """An AttributeProto as a Python value: numbers, text, arrays, lists of them; graphs stay protos."""
    kind = attribute.type
    if kind == 1:
        return float(attribute.f)
    if kind == 2:
        return int(attribute.i)
    if kind == 3:
        return attribute.s.decode("utf-8", "replace")
    if kind == 4:
        return tensor_array(attribute.t, folder)
    if kind == 5:
        return attribute.g
    if kind == 6:
        return [float(f) for f in attribute.floats]
    if kind == 7:
        return [int(i) for i in attribute.ints]
    if kind == 8:
        return [s.decode("utf-8", "replace") for s in attribute.strings]
    if kind == 9:
        return [tensor_array(t, folder) for t in attribute.tensors]
    if kind == 10:
        return list(attribute.graphs)
    if kind == 11:
        return sparse_array(attribute.sparse_tensor, folder)
    if kind == 13:
        return attribute.tp
    raise ModelImportError(f"attribute {attribute.name!r} has kind {kind}, which RLX does not read")
