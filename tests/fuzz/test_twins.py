"""Eager runs of the fuzzer against NumPy: what may differ by the order of operations, and what may not."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.fuzz.twins import TwinError, Twins, compare


def test_a_product_that_overflows_on_the_way_depends_on_the_order() -> None:
    x = np.zeros((64, 2), np.float32, order="F")
    x[:, 0] = 24  # NumPy multiplies in the order of memory: infinity times 0
    with np.errstate(all="ignore"):
        assert np.isnan(np.prod(x))
    assert Twins().prod(x) == 0


def test_another_product_is_found() -> None:
    x = np.full(4, 3, np.float32)
    with pytest.raises(TwinError, match="prod: off by"):
        compare("prod", np.float32(80), np.prod, (x,), {})
