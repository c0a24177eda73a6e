"""Options that this version does not have are refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

import rlx


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "opencl"}, "device 'opencl' runs no programs in this version; compile for 'cpu'"),
        (
            {"debug": "poison"},
            "debug='poison' is not supported by native programs in this version; use 'nan'",
        ),
        ({"budget": "1MiB"}, "budget is not supported by this version"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], text: str) -> None:
    g = rlx.Graph("double")
    g.output("y", g.input("x", ("n",), "f32") * 2.0)
    with pytest.raises(rlx.errors.UnsupportedError, match=text.replace("(", r"\(")):
        rlx.compile(g, **options)
