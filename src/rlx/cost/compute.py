"""What computing costs, in picoseconds: the other side of the scale on which the gate weighs bytes.

Only proportions matter: whether an element is cheaper to store and read back or to compute again.
"""

from __future__ import annotations

from types import MappingProxyType

# Picoseconds per scalar operation of an elementwise kernel, and per operation of a contraction, whole device.
# cpu: two Zen 4 cores; vector code reaches about 70 operations per ns on maps and 300 on products.
# opencl: PoCL on the same cores, against native programs: maps take 3.7 times, products 2.5 times as long.
ELEMENTWISE_PS = MappingProxyType({"cpu": 15, "opencl": 55})
CONTRACTION_PS = MappingProxyType({"cpu": 4, "opencl": 10})
DEFAULT_ELEMENTWISE_PS = 2
DEFAULT_CONTRACTION_PS = 1


def elementwise_ps(device: str, operations: int) -> int:
    """Time of so many scalar operations; negative when operations are saved.

    >>> elementwise_ps("cpu", 1000)
    15000
    """
    return ELEMENTWISE_PS.get(device, DEFAULT_ELEMENTWISE_PS) * operations


def contraction_ps(device: str, operations: int) -> int:
    """Time of so many operations of matrix products and convolutions.

    >>> contraction_ps("cpu", 1000)
    4000
    """
    return CONTRACTION_PS.get(device, DEFAULT_CONTRACTION_PS) * operations
