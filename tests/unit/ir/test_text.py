"""The text of graphs: readable, deterministic, and read back to the same graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from op_cases import ALL_CASES, Case, by_op
from sample_graphs import GRAPHS, assert_same, assumed, hello, large, nested, stateful

import rlx
from rlx.errors import ParseError, TypeMismatchError
from rlx.ir import attr
from rlx.ir.attr import Attr, Blob
from rlx.ir.dim import parse_dim, sym
from rlx.ir.dtype import ALL_DTYPES, DType, dtype
from rlx.ir.graph import Graph
from rlx.ir.op import Op, Role, Sample, declare, withdraw
from rlx.ir.text.arrays import array_text, read_elements
from rlx.ir.text.read import parse_graph
from rlx.ir.text.write import graph_text
from rlx.ir.types import TensorType, parse_type
from rlx.ir.verify import verify
from rlx.transform.expand import expand_graph


def round_trip(graph: Graph) -> Graph:
    blobs: dict[str, np.ndarray] = {}
    text = graph_text(graph, blobs=blobs)
    again = parse_graph(text, blobs)
    assert_same(graph, again)
    assert graph_text(again) == text
    verify(again)
    return again


@by_op(ALL_CASES)
def test_every_op_reads_back(case: Case) -> None:
    g, _ = case.graph()
    round_trip(g)
    expanded = expand_graph(g)
    round_trip(expanded)


ONE_EACH = list({case.op.name: case for case in ALL_CASES}.values())


@pytest.mark.parametrize("case", ONE_EACH, ids=[case.op.name for case in ONE_EACH])
def test_optimised_graphs_read_back(case: Case) -> None:
    """Fused regions, packed weights and whatever else passes make."""
    g, _ = case.graph()
    round_trip(rlx.optimize(rlx.lower(g)))


@pytest.mark.parametrize("name", GRAPHS)
def test_features_read_back(name: str) -> None:
    round_trip(GRAPHS[name]())


@pytest.mark.parametrize("name", GRAPHS)
def test_texts_are_as_reviewed(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"graph/{name}", str(GRAPHS[name]()))


def test_expanded_text_is_as_reviewed(golden: Callable[[str, str], None]) -> None:
    golden("graph/hello_mir", str(expand_graph(hello())))


def test_text_without_locations() -> None:
    text = graph_text(hello(), locations=False)
    assert "@" not in text
    assert all(n.where == () for n in parse_graph(text).nodes)


def test_results_are_found_again() -> None:
    """Asking a parsed multi-output node for its results makes no new nodes."""
    g = round_trip(nested())
    node = next(n for n in g.nodes if n.op.role is Role.REGION)
    before = len(g)
    assert [r.id for r in g.results(node)] == [n.id for n in g.outputs.values()]
    assert len(g) == before


def test_names_and_locations_of_any_kind() -> None:
    g = Graph('a "quoted"\n\ttext \\ \x00 \u2028 \ud800 日本語')
    x = g.input("layer/0:x", (sym("batch size"), sym("we`ird,]\\}")), "f32")
    g.output("", x)
    g.output("日本", g.add(x.op, (), {"name": "\n", "type": x.type}, where=("a\nb", "", "“c”")))
    again = round_trip(g)
    assert str(g).count("\n") == 5
    assert again.inputs[0].shape == x.shape


def test_order_of_inputs_is_kept() -> None:
    g = Graph()
    a, b = g.input("a", (1,), "f32"), g.input("b", (2,), "f32")
    g.inputs = [b, a]
    assert "inputs %1, %0" in str(g)
    assert [n.attrs["name"] for n in round_trip(g).inputs] == ["b", "a"]


def test_bounds_of_symbols_are_kept() -> None:
    again = round_trip(assumed())
    n = again.inputs[0].shape[0]
    assert not isinstance(n, int) and n.bounds == (1, 64)


def test_symbol_names_that_look_like_functions() -> None:
    g = Graph()
    g.output("y", g.input("x", (sym("min", 1), sym("ceildiv"), sym("max") + 1), "f32"))
    round_trip(g)


def test_states_and_once_are_kept() -> None:
    again = round_trip(stateful())
    assert again.inputs[0].attrs["once"] is True
    assert again.state_values == {}  # values travel beside the text


# -- attribute values


@pytest.fixture
def everything() -> Iterator[Op]:
    """A toy op with an attribute that takes anything."""

    @declare
    class anything(Op):
        """Any attribute."""

        name = "toy_anything"
        role = Role.TUPLE
        attrs = {"value": Attr(lambda v: v, None), "count": Attr(attr.integer, 3)}

        def infer(self, *types: TensorType, value: Any, count: int) -> TensorType:
            return TensorType(dtype("f32"), ())

        def samples(self) -> list[Sample]:
            return []

    yield anything
    withdraw("toy_anything")


VALUES: list[tuple[Any, str]] = [
    (None, "none"),
    (True, "true"),
    (False, "false"),
    (0, "0"),
    (-17, "-17"),
    (10**30, "1" + "0" * 30),
    (1.0, "1.0"),
    (-0.0, "-0.0"),
    (1e16, "1e+16"),
    (5e-324, "5e-324"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (math.nan, "nan"),
    ("", '""'),
    ("none", '"none"'),
    ('"\\\n', r'"\"\\\n"'),
    (dtype("f32"), "f32"),
    (dtype("f8e4m3fnuz"), "f8e4m3fnuz"),
    (parse_dim("2*seq+1"), "{2*seq+1}"),
    (parse_dim("ceildiv(n,2)"), "{ceildiv(n,2)}"),
    (parse_type("bf16[2,n//3]"), "bf16[2,n//3]"),
    (parse_type("f32[]"), "f32[]"),
    ((), "()"),
    ((1,), "(1,)"),
    ((1, 1.0, True, None, "x"), '(1, 1.0, true, none, "x")'),
    (((1, parse_dim("n")), ()), "((1, {n}), ())"),
    (Blob(np.array([1, -1], np.int8)), "i8[2]{1, -1}"),
    (Blob(np.zeros((0, 3), np.float32)), "f32[0,3]{}"),
    (Blob(np.array(2.5)), "f64[]{2.5}"),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[t[:20] for _, t in VALUES])
def test_attribute_values(everything: Op, value: Any, text: str) -> None:
    g = Graph()
    node = g.add(everything, (), {"value": value}, where=())
    expected = "" if value is None else f" {{value={text}}}"
    assert str(g).splitlines()[1] == f"  %0 = toy_anything(){expected} : f32[]"
    again = parse_graph(str(g)).nodes[0].attrs["value"]
    assert type(again) is type(node.attrs["value"])
    assert again == value or (value != value and again != again)
    assert str(parse_graph(str(g))) == str(g)
    written = f'graph "main" {{ %0 = toy_anything() {{value={text}}} }}'  # a default may be written out
    assert str(parse_graph(written)) == str(g)


def test_a_default_is_left_out_only_if_it_is_exactly_that(everything: Op) -> None:
    g = Graph()
    g.add(everything, (), {"count": 3}, where=())
    g.add(everything, (), {"count": 4}, where=())
    assert str(g).splitlines()[1:3] == [
        "  %0 = toy_anything() : f32[]",
        "  %1 = toy_anything() {count=4} : f32[]",
    ]


def test_a_value_without_text_form_is_refused(everything: Op) -> None:
    g = Graph()
    g.add(everything, (), {"value": object()})
    with pytest.raises(TypeMismatchError, match="type object has no text form"):
        str(g)


# -- arrays


@pytest.mark.parametrize("of", ALL_DTYPES, ids=str)
def test_arrays_of_every_dtype_are_exact(of: DType) -> None:
    if of.bits < 8:
        codes = np.arange(2**of.bits).astype(np.uint8)
        array = codes.view(of.np) if of.is_float else codes.astype(of.np)
    elif of.is_bool:
        array = np.array([False, True])
    elif of.bits == 8:
        array = np.arange(256).astype(np.uint8).view(of.np)
    else:
        raw = np.random.default_rng(1).bytes(200 * of.itemsize)
        array = np.frombuffer(raw, of.np)
        if of.is_float or of.is_complex:
            special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 0.1, 1 / 3, 4096.0]).astype(of.np)
            array = np.concatenate([array, special])
    head, _, rest = array_text(array).partition("{")
    again = read_elements(rest.removesuffix("}").split(", "), of, array.shape)
    assert head == f"{of}[{len(array)}]" and again.dtype == of.np
    assert again.tobytes() == array.tobytes()


def test_every_half_precision_value_is_exact() -> None:
    for name in ("f16", "bf16"):
        array = np.arange(65536).astype(np.uint16).view(dtype(name).np)
        texts = array_text(array).partition("{")[2].removesuffix("}").split(", ")
        assert read_elements(texts, dtype(name), array.shape).tobytes() == array.tobytes()


def test_numbers_are_short() -> None:
    values = np.array([0.1, 1, -2.5, 1e-30, np.nan], np.float32)
    assert array_text(values) == "f32[5]{0.1, 1.0, -2.5, 1e-30, nan}"
    odd = np.array([0x7F800001], np.uint32).view(np.float32)
    assert array_text(odd) == "f32[1]{0x7f800001}"


def test_large_arrays_lie_beside_the_text() -> None:
    blobs: dict[str, np.ndarray] = {}
    text = graph_text(large(), blobs=blobs)
    (digest,) = blobs
    assert f"value=blob:{digest}" in text
    with pytest.raises(ParseError, match="is not among the blobs given"):
        parse_graph(text)
    with pytest.raises(ParseError, match="it is damaged"):
        parse_graph(text, {digest: blobs[digest] + 1})


def test_256_bytes_are_written_out_and_257_are_not() -> None:
    for n, inline in ((256, True), (257, False)):
        g = Graph()
        g.constant(np.zeros(n, np.uint8))
        assert ("blob:" not in str(g)) is inline


# -- reading


def test_numbers_of_nodes_are_only_names() -> None:
    g = parse_graph("""
        # node numbers need not count up, spaces and comments are free
        graph "g" { %7 = input() {name="x", type=f32[2]} : f32[2]
          %3 = exp(%7)
          output "y" = %3 }
    """)
    assert [n.id for n in g.nodes] == [0, 1]


def test_a_written_type_must_be_the_inferred_one() -> None:
    with pytest.raises(ParseError, match=r"%1 \(exp\) is written as f32\[3\], but its type is f32\[2\]"):
        parse_graph('graph "g" { %0 = input() {name="x", type=f32[2]} %1 = exp(%0) : f32[3] }')


def test_errors_name_line_and_column() -> None:
    with pytest.raises(ParseError, match=r"line 3, column 8") as caught:
        parse_graph('graph "g" {\n  %0 = input() {name="x", type=f32[2]}\n  %1 = exq(%0)\n}')
    assert caught.value.message == "unknown op 'exq'; did you mean exp?"


@pytest.mark.parametrize(
    "value",
    [
        "(" * 100_000,
        "((((((",
        "{" + "(" * 100_000,
        "9" * 5000,
        "-" * 1000,
        "f32[" + "1," * 50_000,
        "1e999999",
    ],
    ids=["deep tuple", "open tuples", "deep size", "long number", "signs", "long type", "huge float"],
)
def test_hostile_values_end_quickly(value: str) -> None:
    with pytest.raises(ParseError):
        parse_graph(f'graph "g" {{ %0 = input() {{name="x", type={value}}} }}')


def test_hostile_nesting_of_bodies() -> None:
    with pytest.raises(ParseError, match="nested more than 64 deep"):
        parse_graph('graph "g" { %0 = region() {kind="map"} { ' * 5000)
