"""bench/web.py at small sizes: the command runs in Node, and its outputs are those of the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


def test_the_command_measures_exports_in_node(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    require("node")
    require("onnx")
    command = [sys.executable, str(BENCH / "web.py"), "gemm:8,16,24", "--no-browser", "--rounds", "1"]
    more = ["--folder", str(tmp_path / "made"), "--json", str(tmp_path / "found.json")]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    engines = {one["engine"]: one for one in found["row"]["engines"]}
    assert "x86-64" in engines and not engines["x86-64"]["error"]
    measured = engines["node wasm32"]
    assert not measured["error"] and len(measured["times"]) == 3 and measured["difference"] < 1e-5
    assert found["bytes"]["wasm32"] > 1000
    assert (tmp_path / "made" / "gemm_8_16_24" / "wasm32" / "net.mjs").exists()


def test_the_browser_measures_exports(require, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A page that has no debugger asks for its commands; a worker runs them."""
    require("browser")
    sys.path.insert(0, str(BENCH))
    from rlx_bench.harness import EngineError
    from rlx_bench.web.exports import write_exports
    from rlx_bench.web.places import Tab, chromium

    write_exports("gemm:8,16,24", tmp_path)
    with chromium({"made": tmp_path}) as browser:
        tab = Tab(browser, "one")
        ready = tab.ask("make", engine="rlx", folder="/made/gemm_8_16_24/wasm32/", threads=2)["ready"]
        assert 0 < ready < 600
        assert len(tab.ask("time", samples=2, inner=3)["times"]) == 2
        with pytest.raises(EngineError, match="cannot be loaded: 404"):
            tab.ask("make", engine="rlx", folder="/made/none/", threads=1)
        tab.close()
