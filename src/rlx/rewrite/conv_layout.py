"""Layouts of convolutions: kernels packed in panels, chains of images kept in blocked channels.

Every convolution reads its weights from the panels that its native kernel wants. Between convolutions, images
stay in [N, C/lanes, axes, lanes]: a convolution stores its result so (after the elementwise ops that follow
it), pools and elementwise ops work on it as it is, and a conversion is left only where a planar reader meets
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.cost.decision import Decision
from rlx.ir.graph import Graph, Node
from rlx.ir.op import Role, get_op
from rlx.ir.rewrite import copy_node, rewrite
from rlx.ir.types import TupleType
from rlx.ir.weights import weight_ids
from rlx.kernel.form import Map
from rlx.kernel.lowering import lower_node
from rlx.kernel.panels import KernelPanels, read_blocks
from rlx.kernel.scalar import LOADS, axes
from rlx.ops.array.shape import concat, reshape, slice_axis, transpose
from rlx.ops.array.window import GEOMETRY, is_padded
from rlx.ops.storage.packing import from_blocks, read_as, store_as, to_blocks
from rlx.ops.storage.winograd import WinogradLayout, transform_kernel
from rlx.rewrite.conv_cost import Image, WinogradChoice, by_image, choose_winograd, winograd_decision
from rlx.target.tiles import ConvTarget

MOST_EPILOGUE = 24  # elementwise ops after a convolution that may become part of it
LARGEST_FILLING = 1e6  # in lanes that nobody reads: far from overflow, whatever follows
KINDS = (("f32", "f32", "f32"), ("u8", "i8", "i32"), ("bf16", "bf16", "f32"))  # image, kernel, sums
NARROW = ("bf16", "u8", "i8")
IMAGES = ("f32", *NARROW)  # dtypes of images that are kept in blocks


def lay_out_convolutions(graph: Graph, target: ConvTarget) -> tuple[Graph, list[Decision]]:
    """Convolutions read packed weights, and images between them have blocked channels.

    Also returns where Winograd's transforms were considered, their price and the verdict.
    """
    if not any(n.op.family == "conv" for n in graph.nodes):
        return graph, []
    writer = _Writer(_Plan(graph, target))
    out = rewrite(graph, writer.visit)
    with out.building():
        out.set_outputs(
            {name: writer.planar(n) if writer.is_blocked(n) else n for name, n in out.outputs.items()}
        )
    return out, writer.decisions


def _is_packable(node: Node) -> bool:
    """Whether a convolution may have packed weights at all."""
    if node.op.family != "conv":
        return False
    x, w = (o.tensor for o in node.operands)
    kind = tuple(t.dtype.name for t in (x, w, node.tensor))
    fits = kind in KINDS and (is_narrow(node) or node.attrs["fill"] == 0)
    packed = node.operands[1].reader_side
    return fits and w.is_static and 3 <= w.rank <= 5 and 0 not in w.shape and not packed


def is_narrow(conv: Node) -> bool:
    """Whether images are of less than 32 bits: kernels for them read blocked channels only."""
    return conv.operands[0].dtype.bits < 32


def _is_product(node: Node) -> bool:
    """A window of one element that moves by one: on planar images, a matmul."""
    single = all(d == 1 for d in (*node.operands[1].shape[2:], *node.attrs["strides"]))
    return single and not is_padded(node.attrs["padding"])


def is_depthwise(conv: Node) -> bool:
    """One kernel for each channel, over one or two axes."""
    groups, w = conv.attrs["groups"], conv.operands[1].shape
    return groups > 1 and w[0] == groups and w[1] == 1 and len(w) <= 4


def block_of(conv: Node, target: ConvTarget) -> int:
    """Channels in a block of an image that has yet to be blocked: few channels fill no vector."""
    channels, group = int(conv.operands[0].shape[1]), target.group(conv.operands[0].dtype.name)
    alone = conv.attrs["groups"] == 1
    return min(target.lanes, max(-(-channels // group) * group, 2)) if alone else target.lanes


def _keeps_channels(node: Node) -> bool:
    """A view to another shape whose first two axes are those of its operand."""
    if not node.op.has("view") or tuple(node.attrs) != ("shape",) or node.dtype.name not in IMAGES:
        return False
    x = node.operands[0]
    return x.rank > 2 and node.rank > 2 and x.shape[:2] == node.shape[:2]


class _Plan:
    """Which values are stored in blocked channels."""

    def __init__(self, graph: Graph, target: ConvTarget) -> None:
        self.graph, self.target = graph, target
        live = graph.live()
        self.users = {i: [u for u in users if u.id in live] for i, users in graph.users().items()}
        self.kept = {n.id for n in graph.roots()}
        self.weights = weight_ids(graph)
        self.chain_of: dict[int, int] = {}  # elementwise op -> convolution whose epilogue it joins
        self.fillings: dict[int, float | None] = {}  # of images whose last block is not full
        self.end: dict[int, int] = {}  # convolution -> last value of its epilogue
        nodes = [n for n in graph.nodes if n.id in live]
        for node in reversed(nodes):  # of two convolutions that meet, the later one takes the ops that follow
            if _is_packable(node):
                self._grow(node)
        self.blocked: set[int] = set()  # values that are stored blocked
        self.wanted: set[int] = set()  # values that some reader would rather read so
        self.copied = {  # images of bytes of which a convolution makes such a copy, if they are not
            n.operands[0].id
            for n in nodes
            if _is_packable(n)
            and is_narrow(n)
            and self.reads_blocked(n)
            and block_of(n, target) == target.lanes
        }
        for node in reversed(nodes):
            if any(self._accepts(user, node) for user in self.users[node.id]):
                self.wanted.add(node.id)
                if node.id in self.end.values() and self.writes_blocked(graph.nodes[self._root(node.id)]):
                    self.blocked.add(node.id)
            elif node.id in self.end.values() and self._turns_bytes(node):
                self.blocked.add(node.id)

    def _root(self, end: int) -> int:
        return self.chain_of.get(end, end)

    # ---- epilogues

    def _grow(self, conv: Node) -> None:
        """The elementwise ops after a convolution that end in one value."""
        trial, grew = {conv.id}, True
        while grew and len(trial) < MOST_EPILOGUE:
            grew = False
            for i in sorted(trial):
                for user in self.users[i]:
                    if user.id not in trial and user.id not in self.chain_of and self._follows(user, i, conv):
                        trial.add(user.id)
                        grew = True
        ways = [(end, self._closed(end, trial)) for end in sorted(trial)]
        # codes are stored rather than the numbers that they stand for
        narrow = [way for way in ways if way[1] and self.graph.nodes[way[0]].dtype.name in NARROW]
        end, best = max(narrow or ways, key=lambda way: len(way[1]))
        self.end[conv.id] = end
        for i in best - {conv.id}:
            self.chain_of[i] = conv.id

    def _closed(self, end: int, trial: set[int]) -> set[int]:
        """`end` and all before it in `trial`, if nothing but `end` is read elsewhere; else nothing."""
        found, todo = {end}, [end]
        while todo:
            for o in self.graph.nodes[todo.pop()].operands:
                if o.id in trial and o.id not in found:
                    found.add(o.id)
                    todo.append(o.id)
        inner = found - {end}
        open_ = any(i in self.kept or any(u.id not in found for u in self.users[i]) for i in inner)
        return set() if open_ else found

    def _follows(self, user: Node, value: int, conv: Node) -> bool:
        """Whether an op is elementwise over the convolution's result and reads `value` at its own point."""
        if (
            isinstance(user.type, TupleType)
            or user.shape != conv.shape
            or user.bodies
            or user.op.role is not Role.COMPUTE
        ):
            return False
        if user.op.host_only is not None or user.op.has("view") or user.reader_side:
            return False
        form = lower_node(user)
        if not isinstance(form, Map):
            return False
        own = axes(user.rank)
        reads = [e for e in form.body.walk() if e.prim in LOADS]
        return all(e.prim == "load" and e.args == own for e in reads if user.operands[e.data].id == value)

    # ---- blocked images

    def is_whole(self, channels: object) -> bool:
        """Whether blocks of channels are full."""
        return isinstance(channels, int) and channels % self.target.lanes == 0

    def reads_blocked(self, conv: Node) -> bool:
        """Whether a convolution has a kernel that reads blocked channels: not for a few outputs, which would
        leave most of its lanes unused."""
        if not _is_packable(conv):  # its channels may be symbolic
            return False
        wide = conv.attrs["groups"] > 1 or int(conv.shape[1]) >= self.target.lanes // 4
        return (wide or is_narrow(conv)) and self._groups_fit(conv)

    def writes_blocked(self, conv: Node) -> bool:
        return self.reads_blocked(conv) and int(conv.shape[1]) >= self.target.lanes

    def _turns_bytes(self, end: Node) -> bool:
        """Whether codes that nobody reads in blocks are stored so all the same, and moved to planes by a
        kernel of their own: turning a square of bytes takes less than turning the sums that became them.
        """
        conv = self.graph.nodes[self._root(end.id)]
        return is_narrow(conv) and end.dtype.bits == 8 and self.writes_blocked(conv)

    def _groups_fit(self, conv: Node) -> bool:
        groups, (out, per_in) = conv.attrs["groups"], conv.operands[1].shape[:2]
        return groups == 1 or (self.is_whole(out // groups) and self.is_whole(per_in)) or is_depthwise(conv)

    def _accepts(self, user: Node, value: Node) -> bool:
        """Whether `user` would rather read `value` in blocked channels."""
        if user.op.family == "conv":
            return user.operands[0] is value and user.operands[1] is not value and self.reads_blocked(user)
        if user.id in self.chain_of:
            return self.is_image(value, user) and self.end[self.chain_of[user.id]] in self.blocked
        if self.is_pool(user) or self.is_global_sum(user):
            return True
        follows = self.is_elementwise(user) or self.is_channel_concat(user) or self.is_pixel_view(user)
        return follows and user.id in self.wanted

    def is_pool(self, node: Node) -> bool:
        if node.op.family != "pool" or node.dtype.name not in IMAGES:
            return False
        return node.rank == len(node.attrs["window"]) + 2 and 3 <= node.rank <= 5

    def is_global_sum(self, node: Node) -> bool:
        """A reduction over all pixels."""
        if (
            node.op.family != "reduction"
            or getattr(node.op, "combine", "") not in ("sum", "max", "min")
            or node.operands[0].rank < 3
            or node.dtype.name != "f32"
        ):
            return False
        x = node.operands[0]
        return tuple(node.attrs["axes"]) == tuple(range(2, x.rank)) and isinstance(x.shape[1], int)

    def is_elementwise(self, node: Node) -> bool:
        """An elementwise op on images: its other operands are images, numbers, or one number per channel."""
        if not self._is_pointwise(node):
            return False
        if not 3 <= node.rank <= 5 or not isinstance(node.shape[1], int):
            return False
        if not all(self.is_image(o, node) or self._is_channel_vector(o, node) for o in node.operands):
            return False
        return self.is_whole(node.shape[1]) or self._filling(node) is not None

    @staticmethod
    def _is_pointwise(node: Node) -> bool:
        """An op on elements that may be kept in blocks: complex numbers are not."""
        if node.op.family not in ("elementwise", "cast") or isinstance(node.type, TupleType):
            return False
        return not any(n.dtype.is_complex for n in (node, *node.operands))

    def is_image(self, o: Node, node: Node) -> bool:
        """Whether an operand has a pixel for each of the result's; sizes may be equal by assumption only."""
        if o.rank != node.rank or o.shape[:2] != node.shape[:2]:
            return False
        return all(d != 1 or e == 1 for d, e in zip(o.shape[2:], node.shape[2:], strict=True))

    def is_pixel_view(self, node: Node) -> bool:
        """One of the views that repeat pixels (nearest neighbours) and leave images and channels alone."""
        return _keeps_channels(node) and self.is_whole(node.shape[1]) and self._repeats(node)

    def _repeats(self, node: Node) -> bool:
        """Whether this view repeats pixels, or those before or after it do."""
        before = node
        while _keeps_channels(before):
            if before.tensor.numel != before.operands[0].tensor.numel:
                return True
            before = before.operands[0]
        return self._repeats_later(node)

    def _repeats_later(self, node: Node) -> bool:
        return any(
            _keeps_channels(u) and (u.tensor.numel != node.tensor.numel or self._repeats_later(u))
            for u in self.users[node.id]
        )

    def _is_channel_vector(self, o: Node, node: Node) -> bool:
        """One number for all, per channel, or per image and channel."""
        aligned = (*(1,) * (node.rank - o.rank), *o.shape)
        if any(d != 1 for d in aligned[2:]) or aligned[1] not in (1, node.shape[1]):
            return False
        return aligned[0] == 1 or (aligned[0] == node.shape[0] and aligned[1] == node.shape[1])

    def _filling(self, node: Node) -> float | None:
        """What an image has in the lanes after its last channel; None where that might not be finite.

        Convolutions leave zeros there and multiply them by zeros, so any finite number does no harm.
        """
        if node.id not in self.fillings:
            self.fillings[node.id] = self._find_filling(node)
        return self.fillings[node.id]

    def _find_filling(self, node: Node) -> float | None:
        if self.is_pool(node):
            return 0.0 if self._filling(node.operands[0]) == 0 else None  # else it depends on the window
        if not self._is_pointwise(node) or node.id in self.chain_of:
            return 0.0
        values = []
        for o in node.operands:
            if self.is_image(o, node):
                found = self._filling(o)
            elif o.tensor.numel != 1:
                found = 0.0  # a number per channel is filled up with zeros
            else:
                found = float(o.attrs["value"].array.reshape(())) if o.op.role is Role.CONSTANT else None
            if found is None:
                return None
            values.append(np.asarray(found, o.dtype.np))
        with np.errstate(all="ignore"):
            made = float(np.asarray(node.op.ref(*values, **node.attrs)))
        return made if abs(made) < LARGEST_FILLING else None

    def is_channel_concat(self, node: Node) -> bool:
        if node.op.family != "concat" or not 3 <= node.rank <= 5 or node.dtype.name not in IMAGES:
            return False
        return node.attrs["axis"] == 1 and all(self.is_whole(o.shape[1]) for o in node.operands)


def as_image(blocks: Node, like: Node) -> Node:
    """Blocks read as an image that has the channels of another one."""
    made: Node = from_blocks(blocks, int(like.shape[1]))
    return made


class _Writer:
    """The rewritten graph."""

    def __init__(self, plan: _Plan) -> None:
        self.plan, self.lanes = plan, plan.target.lanes
        self.packed: dict[tuple[int, KernelPanels | WinogradLayout], Node] = {}
        self.copies: dict[tuple[int, int], Node] = {}  # image and channels of a block -> its blocks
        self.decisions: list[Decision] = []

    def visit(self, node: Node, operands: tuple[Node, ...], out: Graph) -> Node | None:
        plan, operands = self.plan, self.beside(node, operands)
        made: Node | None = None
        if node.op.family == "conv" and node.operands[1].reader_side:
            return None  # its layouts were chosen already
        if _is_packable(node):
            made = self.convolution(node, operands)
        elif plan.is_pool(node) and self.is_blocked(operands[0]):
            made = self.pool(node, operands[0])
        elif plan.is_global_sum(node) and self.is_blocked(operands[0]):
            made = self.global_sum(node, operands[0])
        elif plan.is_pixel_view(node) and node.id in plan.wanted and self.is_blocked(operands[0]):
            blocks = operands[0].operands[0]
            shape = (*blocks.shape[:2], *node.shape[2:], self.lanes)
            made = as_image(node.op(blocks, shape=shape), node)
        elif node.id not in plan.chain_of and node.id in plan.wanted and self.all_blocked(node, operands):
            made = (
                self.elementwise(node, operands) if plan.is_elementwise(node) else self.concat(node, operands)
            )
        else:
            operands = tuple(self.readable(node, i, o) for i, o in enumerate(operands))
            made = copy_node(node, operands, out)
        return self.stored_blocked(made) if node.id in plan.blocked else made

    def is_blocked(self, node: Node) -> bool:
        return read_blocks(node) is not None

    def stored_blocked(self, node: Node, lanes: int = 0) -> Node:
        return as_image(to_blocks(node, lanes or self.lanes), node)

    def all_blocked(self, node: Node, operands: Sequence[Node]) -> bool:
        """Whether every image that an elementwise op or concat reads is blocked."""
        plan = self.plan
        if not plan.is_elementwise(node) and not plan.is_channel_concat(node):
            return False
        if plan.is_channel_concat(node):
            return all(self.is_blocked(o) for o in operands)
        images = [o for o in operands if plan.is_image(o, node)]
        return bool(images) and all(self.is_blocked(o) for o in images)

    def readable(self, node: Node, at: int, operand: Node) -> Node:
        """What an op reads: epilogues and maps find blocked elements themselves, others (and gathers, whose
        places are checked against a tensor in memory) get a planar copy."""
        if not self.is_blocked(operand) or node.id in self.plan.chain_of:
            return operand
        form = lower_node(node) if node.op.role is Role.COMPUTE and node.op.has("lower") else None
        if isinstance(form, Map) and not node.op.has("view"):
            if not any(e.prim == "load_checked" and e.data == at for e in form.body.walk()):
                return operand
        return self.planar(operand)

    def beside(self, node: Node, operands: tuple[Node, ...]) -> tuple[Node, ...]:
        """What an elementwise op reads on its way to blocks: of images that a convolution wants in blocks
        too, those blocks.
        """
        plan = self.plan
        root = plan.chain_of.get(node.id)
        to_blocks = node.id in plan.wanted if root is None else plan.end[root] in plan.blocked
        if not to_blocks or not plan.is_elementwise(node):
            return operands
        copied = [plan.is_image(o, node) and o.id in plan.copied for o in node.operands]
        return tuple(self.in_blocks(o) if c else o for o, c in zip(operands, copied, strict=True))

    def in_blocks(self, node: Node, lanes: int = 0) -> Node:
        """A planar image copied to blocks, once for all that read it so."""
        key = node.id, lanes or self.lanes
        if self.is_blocked(node):
            return node
        if key not in self.copies:
            self.copies[key] = self.stored_blocked(node, lanes)
        return self.copies[key]

    def planar(self, node: Node) -> Node:
        """A blocked image copied to planes."""
        blocks, copy = node.operands[0], get_op("copy")
        if not isinstance(node.shape[1], int) or node.shape[1] % self.lanes:
            made: Node = copy(node)
            return made
        last = blocks.rank - 1
        made = reshape(copy(transpose(blocks, (0, 1, last, *range(2, last)))), node.shape)
        return made

    def convolution(self, node: Node, operands: tuple[Node, ...]) -> Node:
        x, w = operands
        blocked = self.is_blocked(x) and self.plan.reads_blocked(node)
        if self.is_blocked(x) and not blocked:
            x = self.planar(x)
        if not blocked and is_narrow(node) and self.plan.reads_blocked(node):
            x, blocked = self.in_blocks(x, block_of(node, self.plan.target)), True
        if is_depthwise(node):  # its kernels go from blocks to blocks or from planes to planes
            (self.plan.blocked.add if blocked else self.plan.blocked.discard)(self.plan.end[node.id])
        layout = self.winograd_layout(node, blocked)
        if layout is not None:
            x = x if blocked else self.stored_blocked(x)
            self.plan.blocked.add(self.plan.end[node.id])
        block = int(x.operands[0].shape[-1]) if blocked else 1
        made: Node = node.op(x, self.pack(w, layout or self.kernel_layout(node, block)), **node.attrs)
        return made

    def pack(self, w: Node, layout: KernelPanels | WinogradLayout | None) -> Node:
        """A kernel in a layout; one that several convolutions read is packed once."""
        if layout is None:
            return w
        key = (w.id, layout)
        if key not in self.packed:
            if isinstance(layout, KernelPanels):
                self.packed[key] = read_as(store_as(w, layout=layout.layout), layout=layout.layout)
            else:
                unpack = get_op("unpack_winograd")
                attrs = {k: getattr(layout, k) for k in unpack.attrs}
                self.packed[key] = unpack(transform_kernel(w, layout), **attrs)
        return self.packed[key]

    def winograd_layout(self, node: Node, blocked: bool) -> WinogradLayout | None:
        """Transformed constant weights where they pay, also for moving images to blocks and back."""
        plan, target = self.plan, self.plan.target
        if node.operands[1].id not in plan.weights:
            return None
        blocked_out = plan.end[node.id] in plan.blocked
        priced: dict[str, tuple[WinogradChoice, float]] = {}  # at the sizes that are asked for

        def rule(read: Image, written: Image) -> WinogradLayout | None:
            choice = choose_winograd(node, read, written, target)
            if choice is None:
                return None
            moved = (0 if blocked else math.prod(read)) + (0 if blocked_out else math.prod(written))
            cost = moved / target.prices.moved_elements
            priced["now"] = choice, cost
            return choice.layout if choice.gain > cost else None

        layout = by_image(rule, node)
        if priced:
            self.decisions.append(winograd_decision(node, *priced["now"]))
        return layout

    def kernel_layout(self, node: Node, block: int) -> KernelPanels | None:
        """The panels of a convolution; None where another kernel does better."""
        plan, lanes, blocked = self.plan, self.lanes, block > 1
        shape = tuple(int(d) for d in node.operands[1].shape)
        groups = node.attrs["groups"]
        blocked_out = plan.end[node.id] in plan.blocked
        if is_depthwise(node):  # panels of neighbouring groups, read by a kernel from blocks to blocks
            return KernelPanels(shape, 1, lanes, lanes, 1) if blocked else None
        if not blocked and not blocked_out:
            least = lanes // 4 if groups == 1 else lanes // 2
            if shape[0] // groups < least or _is_product(node) or is_narrow(node):
                return None
        group = plan.target.group(node.operands[0].dtype.name)
        return KernelPanels(shape, groups, plan.target.columns, lanes, block, group)

    def pool(self, node: Node, x: Node) -> Node:
        """A window of one lane more."""
        more = {"strides": (1,), "padding": ((0, 0),), "dilations": (1,)}
        attrs = {k: (*node.attrs[k], *more[k]) for k in GEOMETRY}
        attrs |= {"combine": node.attrs["combine"], "window": (*node.attrs["window"], 1)}
        return as_image(node.op(x.operands[0], **attrs), node)

    def global_sum(self, node: Node, x: Node) -> Node:
        """Blocks and lanes that are left are the channels, in order."""
        blocks = x.operands[0]
        total = node.op(blocks, **{**node.attrs, "axes": tuple(range(2, blocks.rank - 1)), "keepdims": False})
        if not self.plan.is_whole(node.shape[1]):
            channels = reshape(total, (blocks.shape[0], blocks.shape[1] * self.lanes))
            total = slice_axis(channels, 1, 0, node.shape[1])
        made: Node = reshape(total, node.shape)
        return made

    def elementwise(self, node: Node, operands: tuple[Node, ...]) -> Node:
        def aligned(o: Node) -> Node:
            if self.is_blocked(o):
                return o.operands[0]
            if o.tensor.numel == 1:
                made: Node = reshape(o, ())
            else:
                made = to_blocks(reshape(o, (*(1,) * (node.rank - o.rank), *o.shape)), self.lanes)
            return made

        return as_image(node.op(*map(aligned, operands), **node.attrs), node)

    def concat(self, node: Node, operands: tuple[Node, ...]) -> Node:
        joined = concat([o.operands[0] for o in operands], axis=1)
        return as_image(joined, node)
