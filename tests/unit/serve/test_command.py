"""`rlx serve` as users start it: its first lines, its log, its signals, its refusals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from served import Client, started

from rlx.cli.main import main


def test_a_server_says_where_it_is_and_what_it_does(folder: Path) -> None:
    with started(folder, "--max-tokens", "3", "--model-name", "small") as (process, client, about):
        assert about == {"url": client.url, "model": "small", "keys": False, "slots": 16, "context": 512}
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", client.url)
        assert client.chat(model="small").json["usage"]["completion_tokens"] <= 3
        assert client.get("/nothing\x1b[31m".replace("\x1b", "%1b")).status == 404
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out == ""
    assert re.search(r"^\d{4}-\S+ \S+ 127\.0\.0\.1 POST '/v1/chat/completions' 200 \d\.\d+ s$", err, re.M), (
        err
    )
    assert "'/nothing\\x1b[31m' 404" in err and "\x1b" not in err
    assert "stopping when the requests that are here have been answered" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish(folder: Path, number: int) -> None:
    with started(folder, "--quiet") as (process, client, _):
        with client.open_stream(logprobs=True, top_logprobs=20) as connection:
            found = connection.recv(1000)
            process.send_signal(number)
            while part := connection.recv(65536):
                found += part
        assert b"data: [DONE]" in found
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and (out, err) == ("", "")


def test_a_second_signal_stops_at_once(folder: Path) -> None:
    """A body that does not end would be waited for until --timeout."""
    with started(folder, "--quiet") as (process, client, _):
        connection = client.open_stream(cut=3)
        assert client.get("/health").status == 200  # by now it has read the other
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
        connection.close()


def test_keys_from_a_file(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a-secret-key\n")
    path.chmod(0o600)
    with started(folder, "--api-key-file", str(path)) as (_, client, about):
        assert about["keys"] is True
        assert client.chat().status == 401
        assert Client(client.url, "a-secret-key").chat(max_tokens=1).status == 200


def test_refusals(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert main(["serve", str(folder), "--port", "0", *options]) == 1
        return capfd.readouterr().err

    (tmp_path / "keys").write_text("a-secret-key")
    (tmp_path / "keys").chmod(0o644)
    assert "can be read by others; run: chmod 600" in refused("--api-key-file", str(tmp_path / "keys"))
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a plain file" in refused("--api-key-file", str(tmp_path / "pipe"))
    assert "top_p is 3.0" in refused("--top-p", "3")
    assert "cannot listen on 192.0.2.1 port 0: " in refused("--host", "192.0.2.1")
    assert "cannot listen on not.a.name.invalid port 0: " in refused("--host", "not.a.name.invalid")
    assert main(["serve", str(folder), "--port", "70000"]) == 2


def test_a_port_that_is_taken(client: Any, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(folder), "--port", str(client.address[1])]) == 1
    assert "Address already in use; choose another --host or --port" in capfd.readouterr().err
