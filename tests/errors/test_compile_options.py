"""Options that this version does not have are refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

import rlx


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "cuda"}, "device 'cuda' cannot run programs in this version; use 'cpu' or 'opencl'"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], text: str) -> None:
    g = rlx.Graph("double")
    g.output("y", g.input("x", ("n",), "f32") * 2.0)
    with pytest.raises(rlx.errors.UnsupportedError, match=text.replace("(", r"\(")):
        rlx.compile(g, **options)


def test_an_unknown_debug_mode_is_refused() -> None:
    g = rlx.Graph("double")
    g.output("y", g.input("x", ("n",), "f32") * 2.0)
    with pytest.raises(rlx.errors.ConfigError, match="unknown debug mode 'all'; use 'nan' or 'poison'"):
        rlx.compile(g, debug="all")
