"""Units that kernels of a target work in, as stages of the compiler see them: panels of weights, vectors."""

from __future__ import annotations

from rlx.records import dataclass
from rlx.target.prices import DEVICES, Prices


@dataclass(frozen=True)
class PanelTile:
    """The panels that a target's contraction kernels want for one dtype."""

    dtype: str
    columns: int
    lanes: int
    group: int
    quads: str | None = None  # which small weights may lie in panels of quads (`Target.small_bytes`)


@dataclass(frozen=True)
class ConvTarget:
    """What a target's convolution kernels work in: floats of a vector, output channels of a panel; and what
    things cost there.
    """

    lanes: int
    columns: int
    winograd: bool = True  # whether transforms may be used at all
    groups: tuple[tuple[str, int], ...] = ()  # dtype of an image -> channels that one instruction takes
    prices: Prices = DEVICES["cpu"]

    def group(self, dtype: str) -> int:
        """Channels that are multiplied and added together."""
        return dict(self.groups).get(dtype, 1)
