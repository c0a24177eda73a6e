"""Device memory and launches of one run at a time of a program on a device with its own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.codegen.cpu.kernels import KernelSet
from rlx.codegen.opencl.printer import PrintedKernel
from rlx.driver.arena import ArenaSlot
from rlx.driver.opencl.memory import OpenCLMemory
from rlx.driver.opencl.stream import set_arguments
from rlx.driver.region import Tile
from rlx.ir.graph import Graph, Node
from rlx.plan.lir import LirBufferPlan
from rlx.records import dataclass
from rlx.runtime.context import array_over

if TYPE_CHECKING:
    from pyopencl import Kernel

    from rlx.driver.arena import Arena
    from rlx.driver.buffer import Buffer
    from rlx.driver.opencl.device import OpenCLDevice

PER_RUN = ("activation", "input", "output", "state")


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments set, and how many work items run it."""

    kernel: Kernel
    items: int
    group: int


class DeviceContext:
    """Device memory and launches for one run at a time, for one binding of the symbols."""

    def __init__(
        self,
        graph: Graph,
        kernels: KernelSet,
        device: OpenCLDevice,
        plan: LirBufferPlan,
        dims: Sequence[int],
        weights: Arena,
        key: tuple[int, ...],
    ) -> None:
        self.key = key  # what the pool of contexts knows it by
        self.connected: object = None  # states are uploaded, not connected
        self.generation = 0  # of weights
        self.graph, self.device, self.plan = graph, device, plan
        self.arenas = {space: arena_for(device, self.graph, plan, space) for space in PER_RUN}
        self.arenas["weight"] = weights
        self.stream = device.stream()
        self.failed = False  # a run ended in the middle: do not use this context again
        printed = {id: k for id, k in kernels.kernels.items() if isinstance(k, PrintedKernel)}
        self.checked = [id for id, k in printed.items() if k.checks]  # kernel -> number of its error code
        self.errors = device.allocate(4 * len(self.checked))
        self._codes = np.zeros(len(self.checked), np.int32)
        self.launches: dict[int, Launch | None] = {}
        at = 0
        for id, kernel in printed.items():
            self.launches[id] = self._bound(id, kernel, dims[at : at + len(kernel.dims)])
            at += len(kernel.dims) + 1  # scratch, of which device kernels have none, counts as one

    def _bound(self, id: int, kernel: PrintedKernel, dims: Sequence[int]) -> Launch | None:
        """A kernel bound to the memory of this context; None if there is nothing to compute."""
        if dims[0] == 0:
            return None
        node = self.graph.nodes[id]
        arguments: list[OpenCLMemory | np.generic] = []
        for value in (*node.operands, *self.graph.results(node)):
            alias = self.plan.view_aliases.get(value.id)
            tile = self.tile(value.id)
            assert isinstance(tile.memory, OpenCLMemory), "its device gave it"
            arguments += [tile.memory, np.int64(tile.offset + (alias.byte_offset if alias else 0))]
        if kernel.checks:
            arguments += [self.errors, np.int64(self.checked.index(id))]
        made = self.device.kernel(kernel.name)
        set_arguments(made, [*arguments, *(np.int64(d) for d in dims)])
        return Launch(made, *kernel.work(dims[0]))

    def move_to(self, binding: Mapping[str, int]) -> None:
        """A context is for one binding: there is nothing to move."""

    def launch(self, id: int) -> None:
        """Record a run of a node's kernel."""
        found = self.launches[id]
        if found is not None:
            self.stream.launch(found.kernel, None, [found.items], [found.group])

    def begin(self) -> None:
        """Record that no kernel has reported anything yet."""
        if self.checked:
            self.stream.fill(self.errors)

    def finish(self) -> None:
        """Run what was recorded, to its end."""
        if self.checked:
            self.stream.copy(self.errors, self._codes)
        self.stream.submit_and_wait()

    def reported(self) -> list[tuple[int, int]]:
        """(node, code) of kernels that reported an error."""
        return [(id, int(code)) for id, code in zip(self.checked, self._codes, strict=True) if code]

    def tile(self, value: int) -> Tile:
        """The bytes that a value is stored in."""
        slot = self.plan.slot(value)
        return Tile(self.arenas[slot.space].memory, slot.offset, 1, slot.size, slot.size)

    def bytes(self, root: int) -> np.ndarray:
        """A host copy of a stored value; the queue must be empty."""
        tile = self.tile(root)
        return tile.memory.read(tile.offset, tile.nbytes)

    def array(self, node: Node) -> np.ndarray:
        """A host copy of a value; the queue must be empty."""
        return array_over(self.plan, node, self.bytes)

    def upload(self, root: int, array: np.ndarray) -> None:
        """Record the copy of an array to the storage of a value."""
        self.stream.copy(np.ascontiguousarray(array).reshape(-1).view(np.uint8), self.tile(root))

    def download(self, root: int, array: np.ndarray) -> None:
        """Record the copy of a value to a contiguous array."""
        self.stream.copy(self.tile(root), array.reshape(-1).view(np.uint8))

    def keep(self, node: Node, buffer: Buffer) -> None:
        """Record the copy of a value to a buffer on the device; one that is spread out comes to the host
        first, for which the queue must be empty."""
        alias, tile = self.plan.view_aliases.get(node.id), self.tile(node.id)
        if alias is not None and alias.strides is not None:
            buffer.write(np.ascontiguousarray(self.array(node)))
            return
        start = tile.offset + (alias.byte_offset if alias is not None else 0)
        self.stream.copy(Tile(tile.memory, start, 1, buffer.nbytes, buffer.nbytes), buffer)

    def take_results(self, kernels: Sequence[int], old: DeviceContext) -> None:
        """Every run on a device computes everything: there is nothing to take."""

    def take_over(self, old: DeviceContext, done: Sequence[int]) -> None:
        """Record copies of what the nodes `done` computed and later ones read, from a context for other
        sizes.
        """
        made = {r.id for id in done for r in self.graph.results(self.graph.nodes[id])}
        later = self.plan.schedule[len(done) :]
        read = {self.plan.root(o.id) for id in later for o in self.graph.nodes[id].operands}
        read |= {n.id for n in self.graph.roots()}
        for root in sorted(made & read):
            source, target = old.tile(root), self.tile(root)
            self.stream.copy(source, target, min(source.nbytes, target.nbytes))


def arena_for(device: OpenCLDevice, graph: Graph, plan: LirBufferPlan, space: str) -> Arena:
    """The arena of a space: one piece of device memory of the planned size."""
    slots = {
        id: ArenaSlot(slot.offset, graph.nodes[id].dtype, graph.nodes[id].tensor.bind(plan.binding))
        for id, slot in plan.assignments.items()
        if slot.space == space
    }
    return device.arena(slots, plan.sizes()[space], plan.alignment)
