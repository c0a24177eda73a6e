"""The examples of docs/serve.md run as they are written, with a small model in place of SmolLM2."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "serve.md"
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)


def test_the_commands(serving: Any, require: Callable[[str], None]) -> None:
    require("curl")
    install, commands = blocks("bash")
    assert install.startswith("pip install '.[serve]'\nrlx serve ")
    found = []
    with serving(name="smollm2") as client:
        for command in re.findall(r"^curl .*?(?=^curl |\Z)", commands, re.S | re.M):
            done = subprocess.run(
                ["bash", "-c", command.replace(ADDRESS, client.url).replace("curl ", "curl --fail ", 1)],
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            found.append(done.stdout)
    assert len(found) == 7
    assert json.loads(found[0])["choices"][0]["message"]["content"]
    assert found[1].endswith("data: [DONE]\n\n") and found[1].count("data: ") >= 4
    assert json.loads(found[2])["choices"][0]["text"] and len(json.loads(found[3])["data"]) == 2
    assert json.loads(found[4])["data"][0]["id"] == "smollm2" and json.loads(found[5]) == {"status": "ok"}
    assert "rlx_requests_total" in found[6]


def test_the_client(serving: Any, require: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    require("openai")
    with serving(name="smollm2") as client:
        names: dict[str, Any] = {}
        exec(compile(blocks("python")[0].replace(ADDRESS, client.url), str(PAGE), "exec"), names)
        want = client.model.chat("Who wrote Hamlet?", max_tokens=50)
        assert capsys.readouterr().out.startswith(f"{want}\n{want}")
        assert json.loads(names["answer"].choices[0].message.content).keys() == {"name", "born"}


def test_a_server_in_a_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")[1].replace("zoo:smollm2", str(folder))
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+\n", capsys.readouterr().out)
    threads = [thread for thread in names["threading"].enumerate() if "(run)" in thread.name]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_every_option_is_on_the_page() -> None:
    from rlx.cli.serve import serve

    text = PAGE.read_text(encoding="utf-8")
    missing = [
        name for option in serve.params for name in option.opts if name[:2] == "--" and f"`{name}" not in text
    ]
    assert not missing
