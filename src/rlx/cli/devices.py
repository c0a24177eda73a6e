"""rlx devices: what programs can run on here, and what is missing for the others."""

from __future__ import annotations

from dataclasses import asdict

import click

from rlx.cli.output import human_bytes, json_option, print_json, print_line, print_sentence, print_table
from rlx.driver import known_devices, open_device
from rlx.files import Json
from rlx.system import SYSTEM
from rlx.target.cpu import host, host_text, missing_here, runs_here, targets


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List devices and CPU targets, and what is missing for those that cannot be used."""
    found: list[Json] = []
    for entry in known_devices():
        missing = entry.missing()
        facts = asdict(open_device(entry.name).capabilities) if missing is None else None
        found.append({"name": entry.name, "available": missing is None, "missing": missing, "facts": facts})
    seen, every = host(), targets()
    named: list[Json] = [
        {"name": t.name, "host": t == seen, "runs_here": runs_here(t), "missing": list(missing_here(t))}
        for t in (every if seen in every else (seen, *every))
    ]
    if as_json:
        print_json({"devices": found, "host": seen.name, "targets": named})
        return
    rows = []
    for device in found:
        facts = device["facts"]
        if facts is not None:
            size = human_bytes(facts["total_memory"])
            about = f"{facts['description']}, {facts['compute_units']} cores, {size}"
        else:
            about = str(device["missing"])
        rows.append((str(device["name"]), "yes" if device["available"] else "no", about))
    print_table(("device", "available", "about"), rows)
    print_line()
    rows = [
        (
            str(target["name"]),
            "host" if target["host"] else "yes" if target["runs_here"] else "no",
            "" if target["runs_here"] else _why_not(target["missing"]),
        )
        for target in named
    ]
    print_table(("target", "runs here", "about"), rows)
    print_sentence(f"host: {host_text()}")


def _why_not(missing: list[str]) -> str:
    if not SYSTEM.runs_native_code:
        return "native code runs on Linux only"
    return f"lacks {', '.join(missing) or 'the instruction set'}"
