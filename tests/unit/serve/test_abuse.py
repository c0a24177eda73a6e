"""Clients that leave, send nonsense or do not read: others get their answers, and nothing is left behind."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served import CONTEXT, Client, held, started, wait_for
from tiny_chat import write_chat_model

from measured import resident_bytes
from rlx.llm.engine import QUIET_SECONDS
from rlx.serve.body import MOST_BODY

CHAT = "/v1/chat/completions"
KEY = "correct-horse"


def is_idle(client: Any) -> bool:
    stats = client.engine.stats()
    return stats["running"] == 0 and stats["waiting"] == 0


def test_a_client_that_leaves_frees_its_slot(serving: Any) -> None:
    with serving(slots=1) as client:
        with held(client.engine):
            leaving = [client.open_stream(stream=stream) for stream in (True, False)]
            wait_for(lambda: client.engine.stats()["waiting"] == 2)
            for connection in leaving:
                connection.close()
            wait_for(lambda: "rlx_cancelled_total 2" in client.get("/metrics").body.decode())
        wait_for(lambda: is_idle(client))
        assert 'path="/v1/chat/completions",status="499"} 2' in client.get("/metrics").body.decode()
        assert client.chat(max_tokens=1).status == 200


def test_a_client_that_leaves_in_the_middle(client: Any) -> None:
    for _ in range(5):
        with client.open_stream() as connection:
            assert connection.recv(200).startswith(b"HTTP/1.1 200 OK")
    wait_for(lambda: is_idle(client))


def test_a_client_that_reads_nothing(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers wait in the server while they must; when its time is up, it is cut off."""
    monkeypatch.setattr("rlx.serve.connection.HEAD_SECONDS", 0.5)
    with serving(timeout=1.0) as client:
        client.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        with client.open_stream(buffer=1024, logprobs=True, top_logprobs=20):
            wait_for(lambda: "rlx_first_token_seconds_count 1" in client.get("/metrics").body.decode())
            wait_for(lambda: is_idle(client))
            wait_for(lambda: not client.server._server.server_state.connections)
        assert client.chat(max_tokens=1).status == 200


def test_a_head_that_never_ends(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.serve.connection.HEAD_SECONDS", 0.3)
    with serving() as client:
        for begun in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"):
            with socket.create_connection(client.address, timeout=60) as connection:
                connection.sendall(begun)
                try:
                    while connection.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        assert client.get("/health").status == 200


def test_what_is_not_http(client: Any) -> None:
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"A" * 200_000,
        b"PRI * HTTP/2.0\r\n\r\n",
    ):
        with socket.create_connection(client.address, timeout=60) as connection:
            try:
                connection.sendall(sent)
                assert connection.recv(4096).startswith(b"HTTP/1.1 4")
            except (ConnectionResetError, BrokenPipeError):
                pass
    assert client.get("/health").status == 200


# -- many of all kinds


def answered(client: Client, rng: random.Random) -> str:
    status = client.chat("ab", max_tokens=rng.randint(1, 12), temperature=1.0, seed=rng.randrange(99)).status
    assert status == 200
    return "answered"


def streamed(client: Client, rng: random.Random) -> str:
    answer = client.chat("abc", stream=True, max_tokens=rng.randint(1, 12))
    assert answer.status == 200 and answer.events
    return "streamed"


def embedded(client: Client, rng: random.Random) -> str:
    assert client.post("/v1/embeddings", {"input": ["a", "bc"]}).status == 200
    return "embedded"


def leaves_before_the_answer(client: Client, rng: random.Random) -> str:
    client.open_stream(cut=rng.choice([0, 0, 10]), stream=rng.random() < 0.5).close()
    return "left before"


def leaves_in_the_middle(client: Client, rng: random.Random) -> str:
    with client.open_stream() as connection:
        connection.recv(rng.randint(1, 3000))
    return "left in the middle"


def reads_slowly(client: Client, rng: random.Random) -> str:
    with client.open_stream(max_tokens=20) as connection:
        found = b""
        while b"[DONE]" not in found:
            part = connection.recv(1500)
            assert part, found
            found += part
            time.sleep(0.001)
    assert found.startswith(b"HTTP/1.1 200 OK")
    return "read slowly"


def oversize(client: Client, rng: random.Random) -> str:
    assert client.send("POST", CHAT, b"x" * (MOST_BODY + 1), Content_Type="application/json").status == 413
    return "413"


def bad_json(client: Client, rng: random.Random) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    body = body[: rng.randrange(len(body))]
    assert client.send("POST", CHAT, body, Content_Type="application/json").status == 400
    return "400"


def wrong_key(client: Client, rng: random.Random) -> str:
    assert Client(client.url, KEY[: rng.randrange(len(KEY))]).chat().status == 401
    return "401"


def wrong_field(client: Client, rng: random.Random) -> str:
    assert client.chat(**{rng.choice(["tools", "n", "seed"]): "x"}).status == 400
    return "400"


KINDS = [
    answered, answered, streamed, streamed, embedded, leaves_before_the_answer, leaves_in_the_middle,
    reads_slowly, oversize, bad_json, wrong_key, wrong_field,
]  # fmt: skip


def storm(client: Client, count: int, seed: int, workers: int = 8) -> Counter[str]:
    """So many requests of all kinds, some at a time."""

    def one(number: int) -> str:
        rng = random.Random(seed * 1_000_003 + number)
        return rng.choice(KINDS)(client, rng)

    with ThreadPoolExecutor(workers) as pool:
        return Counter(pool.map(one, range(count)))


def test_a_storm_of_requests(serving: Any) -> None:
    with serving(key=KEY, slots=4) as client:
        done = storm(client, 100, seed=1)
        assert len(done) >= 8, done
        wait_for(lambda: is_idle(client))
        text = client.chat("Hello", max_tokens=9).text
        assert text == client.model.chat("Hello", max_tokens=9)


@pytest.fixture
def own_process(folder: Path, tmp_path: Path) -> Iterator[tuple[int, Client]]:
    """A server alone in its process, with 50 MB of weights: less than any model that people serve."""
    write_chat_model(tmp_path, hidden_size=256, intermediate_size=16384, max_position_embeddings=CONTEXT)
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    with started(tmp_path, "--quiet", "--slots", "4", "--api-key-file", str(keys)) as (process, client, _):
        yield process.pid, Client(client.url, KEY)


def left(pid: int, client: Client) -> tuple[int, int]:
    """Bytes and threads of a server that has had nothing to do for a while: it gives memory back then."""
    idle = ("rlx_engine_running 0\n", "rlx_engine_waiting 0\n", "rlx_engine_pages_used 0\n")
    wait_for(lambda: all(line in client.get("/metrics").body.decode() for line in idle))
    time.sleep(3 * QUIET_SECONDS)
    return resident_bytes(pid), len(list(Path(f"/proc/{pid}/task").iterdir()))


def check_storms(pid: int, client: Client, first: int, goes_on: Callable[[int], bool]) -> str:
    """After `first` requests, storms of 100 as long as it goes on: memory stays within 2 %, no slot, page or
    thread is left, and answers are the same. Tells what happened.
    """
    # The largest step: the memory of values between kernels is there as far as a step has needed it.
    assert client.chat("z" * (CONTEXT - 25), max_tokens=1).status == 200
    done = storm(client, first, seed=1)
    memory, threads = left(pid, client)
    said = client.chat("Hello", max_tokens=9).text
    part = 0
    while goes_on(sum(done.values())):
        part += 1
        done += storm(client, 100, seed=1 + part)
    after, threads_after = left(pid, client)
    assert client.chat("Hello", max_tokens=9).text == said
    report = f"{sum(done.values())} requests: {dict(done)}; {memory >> 10} -> {after >> 10} KiB"
    assert threads_after <= threads, f"{threads} -> {threads_after} threads after {report}"
    assert after <= 1.02 * memory, report
    return report


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_leave_nothing_behind(own_process: tuple[int, Client], count: int) -> None:
    print(check_storms(*own_process, 100, lambda done: done < count))


@pytest.mark.slow
def test_a_soak_of_ten_minutes(own_process: tuple[int, Client]) -> None:
    end = time.monotonic() + 600
    print(check_storms(*own_process, 200, lambda _: time.monotonic() < end))
