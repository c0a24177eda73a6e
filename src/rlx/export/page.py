"""Pages that run an exported model in a browser: plain files of `web`, with the settings of the model.

A page has nothing of the model in its code: `page.json` has what differs from model to model, and the ES
module of the export says what the model takes. So its content security policy has no exceptions.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template

from rlx.config import VERSION
from rlx.cost.io import assumed_binding
from rlx.errors import ConfigError, GuardError
from rlx.export.bounds import Ranges
from rlx.plan.lir import LirModule
from rlx.runtime.exported import Page

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self'; img-src 'self' blob: data:; base-uri 'none'; form-action 'none'"
)
"""What a page may load: its own files."""
_SHARED = ("page.mjs", "runner.mjs", "style.css")
_SCRIPTS = {
    "model": ("numbers.mjs",),
    "chat": ("bpe.mjs",),
    "image": (),
    "search": ("numbers.mjs", "wordpiece.mjs"),
    "voice": ("numbers.mjs", "audio.mjs", "capture.mjs"),
}
"""Kinds of pages, and the scripts that each needs besides its own and the shared ones."""


def write_page(folder: Path, name: str, page: Page, sizes: Mapping[str, int]) -> None:
    """Write a page for the model that is exported to a folder as `name`; `sizes` are those it begins with."""
    if page.kind not in _SCRIPTS:
        raise ConfigError(f"kind {page.kind!r} of a page is unknown; choose {', '.join(_SCRIPTS)}")
    title = page.title or name
    facts = {"policy": POLICY, "title": title, "kind": page.kind, "version": VERSION}
    shown = {key: html.escape(value) for key, value in facts.items()}
    frame = Template(_source("frame.html")).substitute(shown, body=_source(f"{page.kind}.html"))
    (folder / "index.html").write_text(frame, encoding="utf-8")
    (folder / "serve.py").write_text(_source("serve.py").replace("$policy", POLICY), encoding="utf-8")
    for script in (*_SHARED, f"{page.kind}.mjs", *_SCRIPTS[page.kind]):
        (folder / script).write_text(_source(script), encoding="utf-8")
    settings = {"model": name, "title": title, "sizes": dict(sizes), **page.settings}
    (folder / "page.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    for file, content in page.data.items():
        (folder / file).write_bytes(content)


def first_sizes(lir: LirModule, ranges: Ranges) -> dict[str, int]:
    """Sizes to begin with: those that the program was planned for, or others that its guards allow."""

    def inside(sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: min(max(sizes.get(name, low), low), high) for name, (low, high) in ranges.items()}

    planned = inside(lir.planner.binding)
    try:
        lir.planner.check_guards(planned)
    except GuardError:
        fixed = {name: low for name, (low, high) in ranges.items() if low == high}
        return inside(assumed_binding(lir.mir, fixed))
    return planned


def _source(name: str) -> str:
    return files("rlx.export").joinpath("web", name).read_text(encoding="utf-8")
