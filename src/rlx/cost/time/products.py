"""Contractions and attention: register tiles that multiply and add."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from rlx.cost.time.bodies import Body, evaluated
from rlx.cost.time.nests import TRANSPOSED, nest_work
from rlx.cost.time.owners import Share
from rlx.cost.time.reads import read_of
from rlx.cost.time.work import Setting, Work
from rlx.kernel.nests import AttentionNest, ContractNest, as_sum
from rlx.kernel.panels import PANEL_VECTORS, quantised_of
from rlx.kernel.scalar import LOADS, Scalar
from rlx.records import dataclass
from rlx.target.cpu import Target
from rlx.target.rates import Rates

AHEAD = 4.0  # vectors that an epilogue has at once
CHAINS = 8  # sums that must run side by side to hide the latency of additions
PACKED_TILES = 4  # row tiles from which a right operand is packed before it is read
DECODED = 4  # operations per vector of codes that are decoded for a product
IN_REGISTERS = 0.75  # of a multiply-add: an instruction that decodes codes next to others
LEAST_TILES = 4  # row tiles of a thread
FEW_QUERIES = 4  # that have a kernel of their own
KEYS = 128  # of a block of scores
SCORE_OPERATIONS = 16  # of softmax, per vector of scores: scale, maximum, exponential, sum
MASK_OPERATIONS = 40  # and of a mask, which is transposed
TURNED = 1.1  # times as long as a product of matrices: queries and results are transposed


@dataclass(frozen=True)
class Tiles:
    """Register tiles: most rows and vectors of one, products that an instruction adds up, and how many
    multiply-adds it takes as long as."""

    rows: int
    vectors: int
    lanes: int
    group: int = 1
    operations: float = 1.0

    def step_ps(self, rates: Rates, rows: float, vectors: float) -> float:
        """One step along k of a tile."""
        waiting = rates.chain_ps * rows * vectors / CHAINS if rows * vectors < CHAINS else 0.0
        loading = (rows + vectors) * rates.fma_ps / 2
        return max(rows * vectors * rates.fma_ps * self.operations, loading, waiting)

    def product_ps(self, rates: Rates, m: int, n: int, k: int, end_ps: float) -> float:
        """A product of matrices in the caches of one core; each vector of results takes `end_ps` more."""
        full, tail = divmod(n, self.vectors * self.lanes)
        steps, count = -(-k // self.group), -(-m // self.rows)
        height, total = m / max(count, 1), 0.0
        for panels, vectors in ((full, self.vectors), (min(tail, 1), -(-tail // self.lanes))):
            tile = steps * self.step_ps(rates, height, vectors) + rates.call_ps + height * vectors * end_ps
            total += panels * count * tile
        return total


def tiles_for(dtype: str, target: Target, rows: int = 0, vectors: int = 0) -> Tiles:
    """The tiles in which a target multiplies operands of a dtype."""
    most, wide = target.tile(dtype if dtype in ("f64", "bf16", "f16", "i8", "u8") else "f32")
    made = Tiles(rows or most, vectors or wide, target.lanes("f64" if dtype == "f64" else "f32"))
    if dtype in ("i8", "u8", "i16"):
        if not target.has_vnni:
            return replace(made, group=2, operations=target.rates.byte_pairs)
        return replace(made, group=2 if dtype == "i16" else 4, operations=1.2 if dtype == "i8" else 1.0)
    if dtype == "bf16" and target.has_bf16:
        return replace(made, group=2, operations=2.0)
    return replace(made, operations=1.5) if dtype in ("bf16", "f16") else made


@dataclass(frozen=True)
class _Product:
    """Sizes of a contraction."""

    batch: int
    m: int
    n: int
    k: int

    @staticmethod
    def of(nest: ContractNest, at: Setting) -> _Product:
        form, size = nest.form, at.size
        left = [i for i, _ in (*form.batch, *form.contract)]
        right = [j for _, j in (*form.batch, *form.contract)]
        return _Product(
            prod(size(form.lhs[i]) for i, _ in form.batch),
            prod(size(d) for i, d in enumerate(form.lhs) if i not in left),
            prod(size(d) for j, d in enumerate(form.rhs) if j not in right),
            prod(size(form.lhs[i]) for i, _ in form.contract),
        )


def contract_work(nest: ContractNest, at: Setting) -> Work:
    """What a contraction does."""
    p, dtype, layout = _Product.of(nest, at), nest.lhs.dtype.name, nest.rhs_layout and nest.rhs_layout[0]
    if 0 in (p.batch, p.m, p.n, p.k):
        return Work(units=1)
    if dtype not in ("f32", "f64", "bf16", "f16", "i8", "u8"):
        return nest_work(as_sum(nest), at)
    rates, target, rhs, item = at.rates, at.target, nest.rhs.data, nest.rhs.dtype.itemsize
    tiles, space = tiles_for(dtype, target), [at.size(d) for d in nest.space]
    if layout == "unpack_quads" and not target.has_vnni:
        tiles = replace(tiles, group=4, operations=2 * tiles.operations)
    kept = space[: nest.kept]
    end = evaluated(at, [s.body for s in nest.stores], kept)
    end_ps = end.vector_ps(rates, tiles.lanes, len(kept) - 1, len(nest.stores), AHEAD)
    work, row_tiles = Work(), -(-p.m // tiles.rows)
    if nest.rhs_layout is not None and layout == "unpack_sparse":
        return _sparse_work(nest, p, dict(nest.rhs_layout[1])["room"], at, end)
    work.compute_ps = p.batch * tiles.product_ps(rates, p.m, p.n, p.k, end_ps)
    if layout == "dequantize_groups":
        vectors, decoding = p.k * p.n / tiles.lanes, _Decoding.of(nest, target)
        if p.m <= decoding.rows:
            work.compute_ps = vectors * (decoding.instructions + p.m) * IN_REGISTERS * rates.fma_ps
        else:
            work.compute_ps += DECODED * vectors * rates.op_ps
    if layout is None and row_tiles >= PACKED_TILES:
        work.compute_ps += p.batch * p.k * p.n / tiles.lanes * 2 * rates.load_ps
        work.add_inner("l2", 2 * p.batch * p.k * p.n * item)
    if row_tiles > 1:  # a panel meets one row tile after the other
        near = 2 * p.k * tiles.vectors * tiles.lanes * item <= target.l1_bytes
        work.add_inner("l1" if near else "l2", p.batch * row_tiles * p.k * p.n * item)
    work.units = p.batch * row_tiles * -(-p.n // (tiles.vectors * tiles.lanes))
    by_rows = _threads_share_rows(nest, p, row_tiles, at)
    rows = Share() if p.batch == 1 and not by_rows else Share(1, p.m if p.batch == 1 else p.batch)
    if nest.has_prologue:
        first = evaluated(at, [nest.lhs], space)
        vector = first.vector_ps(rates, tiles.lanes, len(space) - 1, 1)
        work.compute_ps += p.batch * p.m * -(-p.k // tiles.lanes) * vector
        for r in first.reads:
            work.read(r.operand, r.footprint(space, at.nbytes[r.operand]), rows.of(at.nbytes[r.operand]))
    else:
        lhs, wanted = nest.lhs.data, p.batch * p.m * p.k * nest.lhs.dtype.itemsize
        work.read(lhs, min(wanted, at.nbytes[lhs]), rows.of(at.nbytes[lhs]))
    work.read(rhs, at.nbytes[rhs], Share())
    own = rows.of(at.nbytes[at.operands]) if rows.step else Share(at.itemsizes[at.operands], p.n)
    work.end(at, [r for r in end.reads if r.operand != rhs], kept, len(nest.stores), own)
    return work


@dataclass(frozen=True)
class _Decoding:
    """How codes are decoded in registers for a few rows: instructions per vector of weights, next to a
    product for each row, and for how many rows there are registers."""

    instructions: int
    rows: int

    @staticmethod
    def of(nest: ContractNest, target: Target) -> _Decoding:
        assert nest.rhs_layout is not None
        stated = dict(nest.rhs_layout[1])
        own = quantised_of(stated["layouts"], stated["group"], target.lanes("f32"))
        if own is not None and own.bits == 8:
            instructions, parts = 2, 1  # extended, converted
        elif target.has_bf16:
            instructions, parts = (
                1,
                2,
            )  # of two k: shifted, looked up, and a product with either part of a row
        else:
            instructions, parts = (2 if target.has_avx512 else 4), 1  # shifted, masked, converted, moved by 8
        return _Decoding(instructions, (target.registers - 6) // (PANEL_VECTORS * (1 + parts)))


def _sparse_work(nest: ContractNest, p: _Product, stored: int, at: Setting, end: Body) -> Work:
    """Lanes are rows, which are turned and looked through for NaN; then each column adds its few elements."""
    rates, lanes, space = at.rates, at.lanes, [at.size(d) for d in nest.space]
    kept, groups = space[: nest.kept], -(-p.batch * p.m // lanes)
    rows = evaluated(at, [nest.lhs], space)
    turned = rows.vector_ps(rates, lanes, len(space) - 1) + TRANSPOSED * rates.op_ps + rates.chain_ps
    column = rates.loop_ps + end.vector_ps(rates, lanes, len(kept) - 1, len(nest.stores), AHEAD)
    work = Work(groups * (p.k * turned + stored * 2 * rates.load_ps + p.n * column), groups)
    for r in rows.reads:
        work.read(r.operand, r.footprint(space, at.nbytes[r.operand]), Share(1, p.m).of(at.nbytes[r.operand]))
    work.read(nest.rhs.data, at.nbytes[nest.rhs.data], Share())
    work.end(at, end.reads, kept, len(nest.stores), Share(1, p.m).of(at.nbytes[at.operands]))
    return work


def _threads_share_rows(nest: ContractNest, p: _Product, row_tiles: int, at: Setting) -> bool:
    """Whether threads share rows, not columns: each has enough of them, and every core has room for all
    weights, or reading them is less than reading all rows."""
    threads, item = at.target.prices.cores, nest.rhs.dtype.itemsize
    if row_tiles < threads * LEAST_TILES:
        return False
    packed = nest.rhs_layout is not None and nest.rhs_layout[0] in ("read_as", "unpack_quads")
    if nest.has_prologue or (packed and p.k * p.n * item <= at.target.l2_bytes // 4):
        return True
    return p.m * nest.lhs.dtype.itemsize > p.n * item


def attention_work(nest: AttentionNest, at: Setting) -> Work:
    """What attention does: two products and a softmax of the scores between them."""
    rates, lanes, batch = at.rates, at.lanes, [at.size(d) for d in nest.batch]
    heads, queries, keys = prod(batch), at.size(nest.queries), at.size(nest.keys)
    depth, values = at.size(nest.depth), at.size(nest.value_depth)
    if 0 in (heads, queries, keys, depth, values):
        return Work(units=1)
    causal = nest.right is not None and at.size(nest.right) < keys and queries > 1
    seen, work = (keys + 1) / 2 if causal else float(keys), Work()
    score_ps = (SCORE_OPERATIONS + MASK_OPERATIONS * len(nest.masks)) * rates.op_ps
    if queries <= FEW_QUERIES:
        per_key = (-(-depth // lanes) + -(-values // lanes)) * rates.fma_ps + rates.combine_ps / 4
        row_ps = seen * per_key + -(-keys // lanes) * score_ps + rates.call_ps
        work.compute_ps, work.units = heads * queries * row_ps, heads
    else:
        tiles = tiles_for(nest.q.dtype.name, at.target)
        blocks, vectors = -(-queries // (lanes * tiles.vectors)), -(-queries // lanes)
        product_ps = (depth + values) / tiles.group * rates.fma_ps * tiles.operations * TURNED
        work.compute_ps = heads * vectors * seen * (product_ps + score_ps)
        work.compute_ps += heads * blocks * -(-keys // KEYS) * 4 * rates.call_ps
        work.units = heads * blocks
        work.add_inner("l2", heads * blocks * seen * (depth + values) * nest.k.dtype.itemsize)
    space = [*batch, queries, keys]
    for e in _loads(nest.q, nest.k, nest.v, nest.score):
        read = read_of(e, at.strides[e.data], space, at.size)
        work.read(e.data, at.nbytes[e.data], _by_heads(read.steps, batch, read.itemsize))
    steps, item = [at.size(s) for s in nest.stores[0].strides], at.itemsizes[at.operands]
    share = _by_heads(steps, batch, item) if heads > 1 else Share(steps[len(batch)] * item, queries)
    work.end(at, (), (), len(nest.stores), share)
    return work


def _loads(*bodies: Scalar) -> list[Scalar]:
    """One load of each operand."""
    return list({e.data: e for b in bodies for e in b.walk() if e.prim in LOADS}.values())


def _by_heads(steps: Sequence[int | None], batch: Sequence[int], itemsize: int) -> Share:
    """How threads share what they read or write by heads."""
    first = next((a for a, n in enumerate(batch) if n > 1), None)
    step = None if first is None else steps[first]
    return Share(abs(step) * itemsize, batch[first]) if step and first is not None else Share()
