"""Kernels, branches and loops of a segment as one list of records.

A body is laid out in place: its kernels become calls whose pointers lead to the operands and results of the
node around it, and to the node's workspace. Code does not grow with the number of steps.

- A branch is a jump over one of its bodies; both store where the node's results are.
- A loop of known length has a call per kernel and step, with the rows of that step; so have slices.
- Any other loop is two copies of its body, which carry values from the results to the workspace and back, and
  jumps: a serial record counts steps and decides whether there is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace

import numpy as np

from rlx.codegen.cpu.kernels import BodyKernels, EmittedKernel
from rlx.ir.dim import Dim, evaluate
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role
from rlx.kernel.control import is_open, loop_form
from rlx.plan.lir import LirBufferPlan, LirWorkspace
from rlx.records import dataclass
from rlx.runtime.barriers import EVERYWHERE, TOGETHER, Mark, Span, Turn
from rlx.runtime.memory import table
from rlx.runtime.native.driver import CLOSED_BRANCH, driver_address, rlx_copy, rlx_count_step, rlx_refuse

ENDLESS = np.iinfo(np.int64).max
_COPY_PS = 40  # per byte, one thread


@dataclass(frozen=True)
class Pointer:
    """An address: absolute, or `offset` bytes into a value that is bound at every run."""

    root: int | None
    offset: int

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.root, self.offset + more)


@dataclass(kw_only=True)
class CallRecord(Turn):
    """One record: a kernel with its operands and the sizes it reads, or a jump to a mark."""

    address: int
    label: str
    pointers: list[Pointer]
    values: list[int] = field(default_factory=list)
    part: int = 0  # of a kernel that runs part by part: see `part_word`

    @property
    def words(self) -> list[int]:
        """What follows the pointers in the argument block."""
        return self.values if self.to is None else [self.to.at]


class CallList:
    """Collects the calls of a segment."""

    def __init__(
        self,
        address: Callable[[str], int],
        binding: Mapping[str, int],
        keep: list[object],
        together: Collection[int] = (),
    ) -> None:
        self.calls: list[CallRecord] = []
        self._together = together  # bound values that may share memory
        self._address, self._binding, self._keep = address, binding, keep
        self._label = ""
        self._zero = table(1)  # what a jump that is always taken looks at
        keep.append(self._zero)
        self._constants: dict[tuple[int, int], np.ndarray] = {}

    def kernel(
        self,
        kernel: EmittedKernel,
        label: str,
        pointers: list[Pointer],
        dims: list[int],
        reads: list[Span],
        writes: list[Span],
        work: int,
    ) -> CallRecord:
        """One call; `work` is how many picoseconds one thread would take."""
        made = CallRecord(
            address=self._address(kernel.name),
            label=label,
            pointers=pointers,
            values=dims,
            reads=reads,
            writes=writes,
            work=work,
            alone=kernel.serial,
        )
        self.calls.append(made)
        return made

    def control(
        self,
        node: Node,
        kernels: Sequence[BodyKernels],
        work: LirWorkspace,
        operands: Sequence[Pointer],
        results: Sequence[Pointer],
        place: Pointer,
        label: str,
    ) -> None:
        """All calls of a node with bodies; `place` is where its workspace is."""
        form = loop_form(node)
        assert form is not None, "only control flow has workspace"
        self._label = label
        control = _Control(self, node, kernels, work, operands, results, place)
        getattr(control, form.control)(**dict(form.config))

    def span(self, start: Pointer, nbytes: int) -> Span:
        """Bytes that a call touches."""
        if start.root in self._together:
            return Span(TOGETHER, *EVERYWHERE)
        return Span(start.root, start.offset, start.offset + nbytes)

    # -- parts of control flow

    def jump(self, unless: Pointer | None, to: Mark) -> None:
        """Go on at a mark where the byte is zero; always, where none is given."""
        byte = Pointer(None, self._zero.ctypes.data) if unless is None else unless
        reads = [self.span(byte, 1)]
        self.calls.append(CallRecord(address=0, label=self._label, pointers=[byte], reads=reads, to=to))

    def mark(self, mark: Mark) -> None:
        mark.at = len(self.calls)

    def copy(self, source: Pointer, target: Pointer, nbytes: int) -> None:
        """Bytes from one place to another."""
        if nbytes:
            self.calls.append(
                CallRecord(
                    address=driver_address(rlx_copy),
                    label=self._label,
                    pointers=[source, target],
                    values=[nbytes],
                    reads=[self.span(source, nbytes)],
                    writes=[self.span(target, nbytes)],
                    work=nbytes * _COPY_PS,
                )
            )

    def is_open(self, body: Graph) -> bool:
        """Whether what a body assumes about sizes holds."""
        return is_open(body, self._binding)

    def refuse(self, code: int) -> None:
        """End the run with an error."""
        self.calls.append(
            CallRecord(
                address=driver_address(rlx_refuse), label=self._label, pointers=[], values=[code], alone=True
            )
        )

    def count(self, go: Pointer, trips: Pointer, cells: np.ndarray, limit: int, first: bool) -> None:
        """Enter the first or another step: its number and whether there is one go to `cells`."""
        step = Pointer(None, cells.ctypes.data)
        self.calls.append(
            CallRecord(
                address=driver_address(rlx_count_step),
                label=self._label,
                pointers=[go, trips, step, step + 8],
                values=[limit, int(not first)],
                reads=[self.span(go, 1), self.span(trips, 8)],
                writes=[self.span(step, cells.nbytes)],
                alone=True,
                all_wait_for=True,  # where a pause ends the walk, it goes on with the next call
            )
        )

    def cells(self) -> np.ndarray:
        """Words of a loop's own: nothing else is ever stored there, so no thread can come late."""
        made = table(3)  # the number of the step, whether there is one, when to pause
        self._keep.append(made)
        return made

    def size(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else evaluate(dim, self._binding)

    def body(
        self,
        body: Graph,
        kernels: BodyKernels,
        plan: LirBufferPlan,
        inputs: Sequence[Pointer],
        outputs: Sequence[Pointer],
        arena: Pointer,
    ) -> None:
        """One run of a body on the given places."""
        sizes = {**self._binding, **plan.binding}
        known = {n.id: p for n, p in zip(body.inputs, inputs, strict=True)}
        known |= {n.id: p for n, p in zip(body.outputs.values(), outputs, strict=True)}

        def pointer(id: int) -> Pointer:
            alias = plan.view_aliases.get(id)
            root, offset = (alias.root, alias.byte_offset) if alias else (id, 0)
            if root in known:
                return known[root] + offset
            if body.nodes[root].op.role is Role.CONSTANT:
                return Pointer(None, self._constant(body.nodes[root])) + offset
            return arena + (plan.assignments[root].offset + offset)

        def span(id: int) -> Span:
            """The bytes of a value, of all that a view looks at."""
            root = plan.root(id)
            return self.span(pointer(root), evaluate(body.nodes[root].tensor.nbytes, sizes))

        label = self._label
        for id in plan.schedule:
            node = body.nodes[id]
            made = body.results(node)
            operands = [pointer(o.id) for o in node.operands]
            results = [pointer(r.id) for r in made]
            if id in kernels.inner:
                work = plan.work[id]
                place = arena + work.slot.offset
                self.control(node, kernels.inner[id], work, operands, results, place, label)
            else:
                kernel = kernels.kernels[id]
                dims = [evaluate(d, sizes) for d in kernel.dims]
                reads = [span(o.id) for o in node.operands if o.op.role is not Role.CONSTANT]
                writes = [span(r.id) for r in made]
                time = evaluate(kernel.picoseconds, sizes)
                self.kernel(kernel, label, operands + results, dims, reads, writes, time)

    def _constant(self, node: Node) -> int:
        """The address of a constant inside a body."""
        key = (id(node.graph), node.id)
        if key not in self._constants:
            self._constants[key] = np.array(node.attrs["value"].array, order="C")
            self._keep.append(self._constants[key])
        return int(self._constants[key].ctypes.data)


@dataclass(eq=False)
class _Control:
    """One node with bodies and where everything of it is; a method per kind of control."""

    layout: CallList
    node: Node
    kernels: Sequence[BodyKernels]
    work: LirWorkspace
    operands: Sequence[Pointer]
    results: Sequence[Pointer]
    place: Pointer

    def run(self, number: int, inputs: Sequence[Pointer], outputs: Sequence[Pointer]) -> None:
        """One run of a body."""
        body, plan = self.node.bodies[number], self.work.bodies[number]
        arena = self.place + self.work.arena_offset
        self.layout.body(body, self.kernels[number], plan, inputs, outputs, arena)

    def bytes(self, node: Node) -> int:
        return self.layout.size(node.tensor.nbytes)

    @property
    def body(self) -> Graph:
        return self.node.bodies[0]

    @property
    def carries(self) -> tuple[list[Pointer], list[Pointer]]:
        """Both places of every carried value: its result, and one in the workspace."""
        spare = [self.place + offset for offset in self.work.carry_offsets[:-1]]
        return list(self.results[: len(spare)]), spare

    def hand_on(self, sources: Sequence[Pointer]) -> None:
        """Copy carried values to the results."""
        for source, result, n in zip(sources, self.results, self.body.outputs.values(), strict=False):
            self.layout.copy(source, result, self.bytes(n))

    def cond(self) -> None:
        otherwise, end = Mark(), Mark()
        chosen, *operands = self.operands
        self.layout.jump(chosen, otherwise)
        self.branch(0, operands)
        self.layout.jump(None, end)
        self.layout.mark(otherwise)
        self.branch(1, operands)
        self.layout.mark(end)

    def branch(self, number: int, operands: Sequence[Pointer]) -> None:
        """One body of a branch; where it assumes other sizes, a record that refuses."""
        if self.layout.is_open(self.node.bodies[number]):
            self.run(number, operands, self.results)
        else:
            self.layout.refuse(CLOSED_BRANCH)

    def scan(self, carries: int, scanned: int, length: Dim, reverse: bool) -> None:
        steps = self.layout.size(length)
        rows = [self.bytes(n) for n in self.body.inputs]
        out_rows = [self.bytes(n) for n in self.body.outputs.values()]
        now, fixed = list(self.operands[:carries]), self.operands[carries + scanned :]
        if steps == 0:
            self.hand_on(now)
        for step in range(steps):
            t = steps - 1 - step if reverse else step
            new = self.carries[(steps - 1 - step) % 2]  # the last step ends in the results
            xs = [self.operands[i] + t * rows[i] for i in range(carries, carries + scanned)]
            ys = [self.results[i] + t * out_rows[i] for i in range(carries, len(out_rows))]
            self.run(0, [*now, *xs, *fixed], [*new, *ys])
            now = new

    def slices(self, symbol: str, size: Dim, sliced: int, axes: tuple[int, ...]) -> None:
        total, plan = self.layout.size(size), self.work.bodies[0]
        chunk = plan.binding[symbol]
        one = {**plan.binding, symbol: 1}
        widths = [evaluate(n.tensor.nbytes, one) for n in self.body.inputs[:sliced]]
        out_widths = [evaluate(n.tensor.nbytes, one) for n in self.body.outputs.values()]
        arena = self.place + self.work.arena_offset
        for start in range(0, total, chunk):
            xs = [p + start * width for p, width in zip(self.operands, widths, strict=False)]
            ys = [p + start * width for p, width in zip(self.results, out_widths, strict=True)]
            # Values of the last slice may be shorter; they are where those of the others are.
            inside = replace(plan, binding={**plan.binding, symbol: min(chunk, total - start)})
            inputs = [*xs, *self.operands[sliced:]]
            self.layout.body(self.body, self.kernels[0], inside, inputs, ys, arena)

    def loop(self, carries: int, rows: object, max_trips: int | None) -> None:
        layout, (first, second) = self.layout, self.carries
        trips, go, *rest = self.operands
        cells, flag = layout.cells(), self.place + self.work.flag_offset
        step = Pointer(None, cells.ctypes.data)
        limit = ENDLESS if max_trips is None else max_trips
        self.hand_on(rest[:carries])
        layout.count(go, trips, cells, limit, first=True)
        top, left, end = Mark(), Mark(), Mark()
        layout.mark(top)
        for source, target, leave in ((first, second, end), (second, first, left)):
            layout.jump(step + 8, leave)
            self.run(0, [*source, step, *rest[carries:]], [*target, flag])
            layout.count(flag, trips, cells, limit, first=False)
        layout.jump(None, top)
        layout.mark(left)
        self.hand_on(second)
        layout.mark(end)
