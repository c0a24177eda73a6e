"""An image in the browser: the classes of a line of text are those of Python, either way up."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import rlx
from chromium import Browser, served
from rlx.cli.inputs import image_tensor
from rlx.cli.main import main
from rlx.ir.types import parse_type
from rlx.zoo.media import read_png


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Pixels u8[height, width, 3]."""

    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


def expected(program, pixels: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    """What the model says of an image, at height 48, blue first, filled with zeros to width 192."""
    wide = min(192, -(-48 * pixels.shape[1] // pixels.shape[0]))
    planes = image_tensor(pixels, parse_type("f32[1,3,h,w]"), {"h": 48, "w": wide}, "line")[:, ::-1]
    x = np.zeros((1, 3, 48, 192), np.float32)
    x[..., :wide] = (planes - 0.5) / 0.5
    return np.asarray(program.run({"x": x})[program.output_names[0]][0])


@pytest.fixture(scope="module")
def folder(require, zoo_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:  # type: ignore[no-untyped-def]
    require("browser")
    zoo_path("ppocr-cls")
    there = tmp_path_factory.mktemp("image")
    assert main(["export", "zoo:ppocr-cls", "--wasm", str(there), "--page"]) == 0
    return there


@pytest.mark.parametrize("threads", [1, 2])
def test_classes_are_those_of_python(
    browser: Browser, folder: Path, zoo_path: Callable[..., Path], tmp_path: Path, threads: int
) -> None:
    program = rlx.load("zoo:ppocr-cls", threads=1)
    line = np.repeat(read_png(zoo_path("page"))[2:34, 4:380], 3, axis=2)
    tall = np.random.default_rng(0).integers(0, 256, (80, 50, 3)).astype(np.uint8)  # colours, narrow
    with served(folder) as url:
        browser.open(f"{url}?threads={threads}")
        browser.wait("#status", f"^Ready, with {threads} thread")
        for name, pixels in {"line": line, "tall": tall}.items():
            write_png(tmp_path / f"{name}.png", pixels)
            browser.type("#file", str(tmp_path / f"{name}.png"))
            for turned in (pixels, pixels[::-1, ::-1]):
                browser.wait("#time", "ms$")
                labels, scores = browser.texts("#results .text"), browser.texts("#results code")
                shown = dict(zip(labels, map(float, scores), strict=True))
                want = expected(program, np.ascontiguousarray(turned))
                np.testing.assert_allclose([shown["upright"], shown["upside down"]], want, atol=1e-3)
                assert shown[labels[0]] >= shown[labels[1]]
                browser.click("#turn")
        browser.type("#file", str(folder / "page.json"))
        assert browser.wait("#error", ".") == "page.json is not an image that this browser can show"
