"""Loop nests: maps, reductions, softmax and norms. How they are cut follows `rlx.codegen.cpu.rows`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import gcd, prod

from rlx.cost.time.bodies import Body, evaluated
from rlx.cost.time.owners import Box, Share
from rlx.cost.time.reads import LINE_BYTES, Read
from rlx.cost.time.work import Setting, Traffic, Work
from rlx.kernel.nests import Nest, Store
from rlx.kernel.rounding import is_long_row
from rlx.kernel.scalar import PRIMITIVES, Scalar
from rlx.records import dataclass
from rlx.target.cpu import Target
from rlx.target.rates import Rates

ROW_CHAINS = 4  # sums of a row that run side by side
COLUMN_CHAINS = 4  # columns of one vector that are reduced side by side
TRANSPOSED = 3  # operations per vector of a block that is transposed


@dataclass(frozen=True)
class _Pass:
    """One loop over the points of a nest."""

    body: Body
    stores: tuple[Read, ...] = ()

    def vector_ps(self, rates: Rates, lanes: int, lane: int, ahead: float = 1.0, cut: bool = False) -> float:
        """Time of one vector of points."""
        storing = 0.0
        for store in self.stores:
            wide = rates.load_ps * max(store.itemsize / 4, 0.5)
            storing += wide if store.steps[lane] in (0, 1) else lanes * rates.gather_ps
        return max(self.body.vector_ps(rates, lanes, lane, 0, ahead, cut), storing)


@dataclass(frozen=True)
class _Flat:
    """A nest with as few axes as its accesses allow."""

    space: tuple[int, ...]
    outer: int
    lanes: int
    passes: tuple[_Pass, ...]
    ends: tuple[Read, ...]  # stores of one value per row
    cut: bool = True  # whether parts of a concatenation or padding have code of their own
    divided: int = 0  # axes around the innermost loop whose sizes code does not know

    @property
    def reads(self) -> list[Read]:
        return [r for p in self.passes for r in p.body.reads]

    @property
    def stores(self) -> list[Read]:
        return [*(s for p in self.passes for s in p.stores), *self.ends]


def nest_work(nest: Nest, at: Setting) -> Work:
    """What a loop nest does."""
    flat = _flattened(nest, at)
    if 0 in flat.space:
        return Work(units=1)
    if not nest.stats:
        return _map_work(flat, at)
    return _column_work(flat, at) if _runs_along_columns(nest, flat) else _row_work(flat, at)


def _map_work(flat: _Flat, at: Setting) -> Work:
    """No reduction: lanes along the last axis."""
    work, rates, lanes, space = Work(), at.rates, flat.lanes, flat.space
    (only,) = flat.passes
    lane, turned = len(space) - 1, _reads_across(flat)
    if turned:  # square blocks are transposed in registers
        reads = tuple(_as_contiguous(r, lane) for r in only.body.reads)
        shuffled = only.body.operations + TRANSPOSED
        only = replace(only, body=replace(only.body, reads=reads, operations=shuffled))
    elif 2 * space[-1] <= lanes:
        lane = _wide_axis(space, only, lanes)
    vector = only.vector_ps(rates, lanes, lane, cut=flat.cut)
    rows = prod(n for a, n in enumerate(space) if a != lane)
    vectors = -(-space[lane] // lanes)
    row_ps = rates.row_ps + flat.divided * rates.divide_ps if len(space) > 1 else 0.0
    work.compute_ps = rows * (vectors * vector + row_ps)
    work.units = rows if len(space) > 1 else vectors
    _add_traffic(work, flat, at, lane, (*flat.reads, *flat.stores) if turned else ())
    return work


def _row_work(flat: _Flat, at: Setting) -> Work:
    """Lanes along the last reduced axis; a pass over the row for each statistic, and one that stores."""
    work, rates, lanes = Work(), at.rates, flat.lanes
    lane, rows, extent = len(flat.space) - 1, prod(flat.space[: flat.outer]), flat.space[-1]
    between = prod(flat.space[flat.outer : -1])  # loops around the one that lanes run along
    steps, turned = -(-extent // lanes), _turned_rows(flat, at.target)
    work.compute_ps = rows * steps * len(turned) * (TRANSPOSED * rates.op_ps + 2 * rates.load_ps)
    for number, one in enumerate(_row_passes(flat, at.target)):
        vector = one.vector_ps(rates, lanes, lane)
        if not one.stores:
            vector = max(vector, rates.chain_ps / min(ROW_CHAINS, max(steps, 1)))
        work.compute_ps += rows * between * (steps * vector + rates.row_ps / 2)
        work.compute_ps += rows * (0.0 if one.stores else rates.combine_ps)
        if number:
            near = extent * 4 <= at.target.l1_bytes
            work.add_inner("l1" if near else "l2", rows * between * extent * 4)
    work.compute_ps += rows * rates.row_ps
    work.units = rows
    _add_traffic(work, flat, at, lane, turned)
    return work


def _row_passes(flat: _Flat, target: Target) -> list[_Pass]:
    """Passes over a row as they read: copies of what is contiguous across rows, and from scratch what a pass
    before has loaded element by element."""
    lane, near, out = len(flat.space) - 1, set(_turned_rows(flat, target)), list[_Pass]()
    keeps = flat.outer == lane
    for one in flat.passes:
        reads = tuple(_from_scratch(r, lane) if r in near else r for r in one.body.reads)
        out.append(replace(one, body=replace(one.body, reads=reads)))
        near |= {r for r in one.body.reads if keeps and r.itemsize >= 4 and r.is_apart(lane)}
    return out


def _turned_rows(flat: _Flat, target: Target) -> tuple[Read, ...]:
    """What is contiguous across neighbouring rows: it is copied to scratch, in squares, if that fits L2."""
    space, across = flat.space, flat.outer - 1
    if across < 0 or flat.outer != len(space) - 1 or min(space[across:]) < flat.lanes:
        return ()
    found = tuple(
        dict.fromkeys(
            r
            for r in flat.reads
            if None not in r.steps
            and not (r.guarded or any(r.scattered))
            and r.steps[across] == 1
            and r.steps[-1] not in (0, 1)
        )
    )
    size = max((r.itemsize for r in found), default=1)
    copied = (space[-1] * size + LINE_BYTES) * max(LINE_BYTES // size, flat.lanes) * len(found)
    return found if copied <= target.l2_bytes // 2 else ()


def _from_scratch(read: Read, lane: int) -> Read:
    steps = (*read.steps[:lane], 1, *read.steps[lane + 1 :])
    return replace(read, steps=steps, scattered=(), index_operations=0.0)


def _column_work(flat: _Flat, at: Setting) -> Work:
    """Lanes along the last kept axis: every lane reduces its own column, in blocks of two vectors. Columns
    that fit one vector are taken from several places at once, as many as a thread has of them."""
    work, rates, lanes, lane = Work(), at.rates, flat.lanes, flat.outer - 1
    narrow = flat.space[lane] <= lanes
    wide = 1 if narrow else 2
    blocks = prod(flat.space[:lane]) * -(-flat.space[lane] // (wide * lanes))
    loops, points = prod(flat.space[flat.outer : -1]), prod(flat.space[flat.outer :])
    own = -(-blocks // at.target.prices.cores)  # of a thread
    several, single = divmod(own, COLUMN_CHAINS) if narrow else (0, own)
    for one in flat.passes:
        vector = one.vector_ps(rates, lanes, lane, ahead=2.0)
        for count, beside in ((several, COLUMN_CHAINS), (single, wide)):
            step = max(beside * vector, 0.0 if one.stores else rates.chain_ps)
            work.compute_ps += count * (points * step + loops * rates.loop_ps) * blocks / own
    work.compute_ps += blocks * rates.row_ps
    work.units = blocks
    _add_traffic(work, flat, at, lane)
    return work


def _add_traffic(work: Work, flat: _Flat, at: Setting, lane: int, in_blocks: Collection[Read] = ()) -> None:
    """Every operand once; lines that lanes leave before they are used up, as often as they are fetched."""
    space = flat.space
    for is_store, reads in ((False, flat.reads), (True, flat.stores)):
        found: dict[int, Traffic] = {}
        for read in reads:
            whole = at.nbytes[read.operand]
            moved, box = float(read.footprint(space[: len(read.steps)], whole)), _box(read, space)
            strided, share = _strided(read, space, lane), _share(read, space, whole)
            had = found.get(read.operand)
            if had is not None:
                moved, box, strided = min(had.nbytes + moved, float(whole)), None, strided or had.strided
                share = had.share if had.share.step else share
            found[read.operand] = Traffic(read.operand, moved, strided, share, None if is_store else box)
            again = None if read in in_blocks else _fetched_again(read, space, lane, at.target)
            if again is not None:
                work.add_inner(again, prod(space) * LINE_BYTES * at.rates.strided)
        work.traffic += found.values()


def _share(read: Read, space: Sequence[int], nbytes: int) -> Share:
    """How threads share an operand: they take ranges of the first axis. Along quotients and remainders it
    goes on about evenly; of a concatenation a load has its part."""
    first = next((a for a, n in enumerate(space) if n > 1), 0)
    step, extent = read.steps[first] if first < len(read.steps) else 0, space[first]
    if step is None and not read.from_data:
        step = max(round(nbytes / (extent * read.part * read.itemsize)), 1)
    if not step:
        return Share()
    return Share(abs(step) * read.itemsize, extent, max(-read.start // abs(step), 0) if read.guarded else 0)


def _box(read: Read, space: Sequence[int]) -> Box | None:
    """The part of an operand that a load touches."""
    item, steps = read.itemsize, [s for s in read.steps if s is not None and s >= 0]
    if read.guarded or len(steps) < len(space):
        return None
    return Box(read.start * item, tuple(space), tuple(s * item for s in steps), item)


def _strided(read: Read, space: Sequence[int], lane: int) -> bool:
    """Whether neighbours in time are far apart: no prefetcher follows."""
    if len(read.steps) < len(space) or lane == len(space) - 1:
        step = read.steps[lane] if lane < len(read.steps) else 0
        return step is None or abs(step) * read.itemsize >= LINE_BYTES
    inner = read.steps[-1]
    return inner is None or abs(inner) * read.itemsize > 4 * LINE_BYTES


def _fetched_again(read: Read, space: Sequence[int], lane: int, target: Target) -> str | None:
    """The cache that lines come from anew for every element, if the loop leaves them too early."""
    steps = read.steps
    if len(steps) < len(space) or any(s is None for s in steps):
        return None
    unit = next((a for a, s in enumerate(steps) if s == 1 and space[a] > 1), None)
    if unit is None or unit in (lane, len(space) - 1):
        return None
    moving = [
        (n, abs(s) * read.itemsize)
        for a, (n, s) in enumerate(zip(space, steps, strict=True))
        if a > unit and s
    ]
    inside = prod(n for n, _ in moving)
    step = max((s for _, s in moving), default=0)
    if inside <= _lines_that_fit(target.l1_bytes, target.rates.l1_ways, step):
        return None
    return "l2" if inside <= _lines_that_fit(target.l2_bytes, target.rates.l2_ways, step) else "l3"


def _lines_that_fit(nbytes: int, ways: int, step: int) -> int:
    """Lines a step apart that a cache holds: powers of two share few of its sets."""
    way = nbytes // ways
    return ways * max(way // gcd(max(step, LINE_BYTES), way), 1)


# -- how a nest is cut


def _reads_across(flat: _Flat) -> bool:
    """Whether loads are contiguous along one axis where the stores' axis is not."""
    space = flat.space
    if len(space) < 2 or any(s.steps[-1] != 1 for s in flat.stores):
        return False
    found: set[int | None] = set()
    for read in flat.reads:
        if any(s is None for s in read.steps) or read.guarded or read.steps[-1] in (0, 1):
            continue
        found.add(next((a for a in range(len(space) - 1) if read.steps[a] == 1), None))
    return len(found) == 1 and None not in found


def _as_contiguous(read: Read, lane: int) -> Read:
    return read if read.steps[lane] in (0, 1, None) else replace(read, steps=(*read.steps[:lane], 1))


def _wide_axis(space: Sequence[int], only: _Pass, lanes: int) -> int:
    """Where the last axis leaves most lanes empty, the one that most loads are contiguous along."""
    last = len(space) - 1
    along = [sum(r.steps[a] == 1 for r in only.body.reads) for a in range(len(space))]
    wide = [a for a, n in enumerate(space) if n >= lanes]
    best = max(wide, key=lambda a: (along[a], a), default=last)
    return best if along[best] > along[last] else last


def _runs_along_columns(nest: Nest, flat: _Flat) -> bool:
    if flat.outer in (0, len(flat.space)):
        return False
    if nest.columns is not None and not (len(nest.stats) == 1 and prod(flat.space[flat.outer :]) <= 2):
        return nest.columns
    steps = [r.steps for r in (*flat.reads, *flat.stores)]
    rows = sum(1 for s in steps if len(s) == len(flat.space) and s[-1] == 1)
    columns = sum(1 for s in steps if s[flat.outer - 1] == 1)
    return columns > rows


def _flattened(nest: Nest, at: Setting) -> _Flat:
    """A nest at known sizes, with as few axes as its accesses allow."""
    space, rank = [at.size(d) for d in nest.space], len(nest.space)
    varying = _depends_on(range(nest.outer, rank) if nest.stats else range(max(rank - 1, 0), rank))
    everything = [*(s.body for s in nest.stats), *(s.body for s in nest.stores)]
    widest = max((e.dtype.itemsize for b in everything for e in b.walk() if e.dtype.is_float), default=4)
    lanes = at.target.vector_bytes // (8 if widest == 8 else 4)
    static = [isinstance(d, int) for d in nest.space]
    cut = not nest.stats and not _asks_in_lanes(everything, space, lanes)
    kept, passes, number = set[Scalar](), list[_Pass](), 0
    while number < len(nest.stats):
        bodies = [s.body for s in nest.stats[number : number + 1 + _are_moments(nest, number)]]
        body = evaluated(at, bodies, space, varying, kept, cut=False)
        passes.append(_Pass(replace(body, operations=body.operations + len(bodies))))
        kept |= _saved(bodies, at.target.prices.saved_operations)
        number += len(bodies)
    stores = [_store(n, s, at) for n, s in enumerate(nest.stores)]
    full = [n for n, s in enumerate(nest.stores) if s.full or not nest.stats]
    if full:
        body = evaluated(at, [nest.stores[n].body for n in full], space, varying, kept, cut=cut)
        passes.append(_Pass(body, tuple(stores[n] for n in full)))
    ends = [s for n, s in enumerate(stores) if n not in full]
    return replace(
        _collapsed(space, nest.outer, lanes, passes, ends, static, _used_apart(everything)), cut=cut
    )


def _asks_in_lanes(bodies: Sequence[Scalar], space: Sequence[int], lanes: int) -> bool:
    """Whether every vector asks which part of a concatenation its lanes are in: parts of the last axis are
    narrower than a vector, and lanes run along it."""
    last = len(space) - 1
    if last < 0 or not lanes < 2 * space[-1] < 4 * lanes:
        return False
    guards = [e.args[0] for b in bodies for e in b.walk() if e.prim in ("where", "load_or")]
    return any(x.prim == "axis" and x.data == last for guard in guards for x in guard.walk())


def _used_apart(bodies: Sequence[Scalar]) -> set[int]:
    """Axes that occur outside of plain loads: code does not merge them with others."""
    found, seen, stack = set[int](), set[Scalar](), list(bodies)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        if e.prim == "axis":
            found.add(e.data)
        if e.prim != "load":
            stack.extend(e.args)
    return found


def _are_moments(nest: Nest, number: int) -> bool:
    """Whether a sum and that of squared distances from its mean are computed in one pass."""
    if number + 1 >= len(nest.stats) or not is_long_row(nest.space[-1]):
        return False
    first, second = nest.stats[number : number + 2]
    return first.combine == second.combine == "sum" and second.body.prim == "mul"


def _saved(bodies: Sequence[Scalar], least: int) -> set[Scalar]:
    """What later passes find in scratch."""
    return {e for b in bodies for e in b.walk() if e.prim in PRIMITIVES and PRIMITIVES[e.prim].cost >= least}


def _store(number: int, store: Store, at: Setting) -> Read:
    result = at.operands + number
    return Read(result, at.itemsizes[result], tuple(at.size(s) for s in store.strides))


def _depends_on(axes: Collection[int]) -> Callable[[Scalar], bool]:
    known: dict[Scalar, bool] = {}

    def depends(e: Scalar) -> bool:
        if e not in known:
            known[e] = (e.prim == "axis" and e.data in axes) or any(depends(a) for a in e.args)
        return known[e]

    return depends


def _collapsed(
    space: Sequence[int],
    outer: int,
    lanes: int,
    passes: Sequence[_Pass],
    ends: Sequence[Read],
    static: Sequence[bool],
    apart: Collection[int],
) -> _Flat:
    """Axes of size 1 vanish, unless only the run knows their size, and neighbours merge that all accesses
    pass through as one."""
    rank = len(space)
    all_reads = [r for p in passes for r in (*p.body.reads, *p.stores)]
    full = [*(r.steps for r in all_reads), *((*r.steps, *(0,) * (rank - len(r.steps))) for r in ends)]
    axes = [a for a in range(rank) if space[a] != 1 or not static[a]]
    sizes = {a: space[a] for a in axes}
    at = len(axes) - 2
    while at >= 0:
        low, high = axes[at], axes[at + 1]
        same = (low < outer) == (high < outer) and low not in apart and high not in apart
        if same and all(_follow(s[low], s[high], sizes[high]) for s in full):
            sizes[high] *= sizes[low]
            del axes[at]
        at -= 1

    kept, reduces = sum(a < outer for a in axes), any(not p.stores for p in passes)
    bare = not axes or (reduces and kept == len(axes))  # nothing for lanes to run along

    def thin(read: Read) -> Read:
        found = tuple(read.steps[a] for a in axes if a < len(read.steps))
        loose = tuple(read.scattered[a] for a in axes) if read.scattered else ()
        if bare and len(read.steps) == rank:
            return replace(read, steps=(*found, 0), scattered=(*loose, False) if loose else ())
        return replace(read, steps=found, scattered=loose)

    return _Flat(
        (*(sizes[a] for a in axes), *(1,) * bare),
        kept if reduces else len(axes) + bare,
        lanes,
        tuple(
            _Pass(replace(p.body, reads=tuple(map(thin, p.body.reads))), tuple(map(thin, p.stores)))
            for p in passes
        ),
        tuple(map(thin, ends)),
        divided=sum(not static[a] for a in axes[1:-1]),
    )


def _follow(step: int | None, inner: int | None, extent: int) -> bool:
    """Whether an axis goes on where the next one ends."""
    return step is not None and inner is not None and step == inner * extent
