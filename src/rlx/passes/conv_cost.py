"""When Winograd's transforms pay: a model of direct and transformed 3x3 convolutions on one core.

F(4, 3) does 4 times fewer products than the window and F(2, 3) 2.25 times fewer, but their weights are 4 and
1.8 times larger and are read from memory once a run, and inputs and sums pass through scratch. Small images
with many channels therefore stay with m = 2 or with direct sums. Bytes are transformed to 16 bits, of which
an instruction takes half as many: F(4, 3) has half the time of direct sums.
"""

from __future__ import annotations

from rlx.ir.dim import Dim
from rlx.ir.dtype import F32, I8
from rlx.ir.graph import Node
from rlx.ops.winograd import WinogradLayout
from rlx.records import dataclass

USUAL_SIZE = 56  # what a symbolic size counts as when costs are compared


@dataclass(frozen=True)
class ConvTarget:
    """What a target's convolution kernels work in: floats of a vector, output channels of a panel; and what
    one core of it does in a nanosecond.
    """

    lanes: int
    columns: int
    winograd: bool = True  # whether transforms may be used at all
    groups: tuple[tuple[str, int], ...] = ()  # dtype of an image -> channels that one instruction takes
    flops: float = 117.0
    weight_bytes: float = 15.0  # read from memory once a run, beside a busy neighbour
    scratch_bytes: float = 30.0  # written to and read from L2
    exact_bytes: float = 60.0  # the same in smaller strips
    moved_elements: float = 3.0  # from planar to blocked and back

    def group(self, dtype: str) -> int:
        """Channels that are multiplied and added together."""
        return dict(self.groups).get(dtype, 1)


@dataclass(frozen=True)
class WinogradChoice:
    """The best transform of a convolution and the nanoseconds that it saves over direct sums, which take
    `direct`.
    """

    layout: WinogradLayout
    gain: float
    direct: float


def _usual(d: Dim, size: int = USUAL_SIZE) -> int:
    return d if isinstance(d, int) else size


def elements(shape: tuple[Dim, ...]) -> int:
    """Elements of an image [N, C, axes], with usual sizes for symbolic ones."""
    total = _usual(shape[0], 1)
    for d in shape[1:]:
        total *= _usual(d)
    return total


def choose_winograd(node: Node, target: ConvTarget) -> WinogradChoice | None:
    """The transform that pays most; None where the window does not fit or direct sums are cheapest."""
    w, one, group = node.operands[1], (1, 1), target.group(node.operands[0].dtype.name)
    if not target.winograd or node.attrs["groups"] != 1 or w.shape[2:] != (3, 3):
        return None
    if node.attrs["strides"] != one or node.attrs["dilations"] != one:
        return None
    out, channels = int(w.shape[0]), int(w.shape[1])
    if out < target.lanes or channels % target.lanes:
        return None
    exact, pairs = w.dtype is I8, target.group("i16")
    if not (w.dtype is F32 or (exact and pairs > 1)):
        return None
    item, point, rate = (1, 2, pairs) if exact else (4, 4, 1)  # bytes of a weight and a point; points at once
    n, (h, wide) = _usual(node.shape[0], 1), (_usual(d) for d in node.shape[2:])
    padded = -(-out // target.lanes) * target.lanes
    size = padded * channels

    def cost(m: int) -> float:
        """Nanoseconds; m = 1 is the direct sum."""
        if m == 1:
            return 18 * n * h * wide * size / (target.flops * group) + 9 * item * size / target.weight_bytes
        points, tiles = (m + 2) ** 2, n * -(-h // m) * -(-wide // m)
        products = 2 * tiles * points * size / (target.flops * rate)
        products += point * points * size / target.weight_bytes
        moved = 2 * tiles * points * (4 * padded * layout(m).parts + point * channels)
        return products + moved / (target.exact_bytes if exact else target.scratch_bytes)

    def layout(m: int) -> WinogradLayout:
        return WinogradLayout(m, out, channels, target.columns, target.lanes, rate)

    best = min((1, 4) if exact else (1, 2, 4), key=cost)
    if best == 1:
        return None
    return WinogradChoice(layout(best), cost(1) - cost(best), cost(1))


def gains_by_halves(node: Node, target: ConvTarget) -> bool:
    """Whether direct sums of 16-bit operands, in half the time of f32, beat what f32 does best."""
    choice = choose_winograd(node, target)
    return choice is None or choice.gain < choice.direct / 2
