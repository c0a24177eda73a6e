"""The object cache and the key that its entries are signed with."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx import files
from rlx.codegen.native import jit
from rlx.files import unfinished_name
from rlx.ir.text.container import CODE, PLAN, File, write
from rlx.runtime.store import cache as cache_module
from rlx.runtime.store import trust
from rlx.runtime.store.cache import CacheWarning, ObjectCache, default_cache
from rlx.runtime.store.trust import Keyring, TrustError, TrustWarning, load_or_create
from rlx.target.cpu import resolve

TARGET = resolve("x86-64")
MINE, YOURS = Keyring(b"m" * 32), Keyring(b"y" * 32)


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path, keyring=MINE)


def only_entry(cache: ObjectCache) -> Path:
    (entry,) = (cache.directory / "objects").iterdir()
    return entry


def test_an_object_comes_back_and_is_counted(cache: ObjectCache) -> None:
    assert cache.get("ab12", TARGET) is None
    cache.put("ab12", TARGET, b"code")
    assert cache.get("ab12", TARGET) == b"code"
    assert cache.get("ab13", TARGET) is None
    info = cache.info()
    assert (info.entries, info.hits, info.misses, info.rejected) == (1, 1, 2, 0)
    assert info.nbytes == only_entry(cache).stat().st_size
    assert ObjectCache(cache.directory, keyring=MINE).get("ab12", TARGET) == b"code"
    assert cache.clear() == 1
    assert cache.info().entries == 0


def test_what_is_missing_is_made_once(cache: ObjectCache) -> None:
    made = []

    def make() -> bytes:
        made.append(1)
        return b"code"

    assert [cache.get_or_make("ab", TARGET, make) for _ in range(3)] == [b"code"] * 3
    assert len(made) == 1


def test_the_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("RLX_CACHE", str(tmp_path / name))
        assert default_cache().directory == tmp_path / name
        assert default_cache() is default_cache()


def test_code_from_the_cache_runs(cache: ObjectCache) -> None:
    import ctypes

    host = resolve("host")
    text = "define i64 @next(i64 %x) {\n %y = add i64 %x, 1\n ret i64 %y\n}"
    cache.put("ab", host, jit.compile_object(text, host))
    compiles = jit.llvm_compiles
    stored = cache.get("ab", host)
    assert stored is not None
    code = jit.load(stored, host)
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("next"))(41) == 42
    assert jit.llvm_compiles == compiles


@pytest.mark.parametrize("part", ["cpu", "features", "triple", "llvm", "generator"])
def test_every_part_of_the_key_counts(cache: ObjectCache, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put("ab", TARGET, b"code")
    other = TARGET
    if part == "cpu":
        other = replace(TARGET, cpu="znver4")
    elif part == "features":
        other = replace(TARGET, features=(*TARGET.features, "avx"))
    elif part == "triple":
        other = replace(TARGET, triple="x86_64-apple-darwin")
    elif part == "llvm":
        monkeypatch.setattr(cache_module, "llvm_version", lambda: "99.0.0")
    else:
        monkeypatch.setattr(cache_module, "generator_version", lambda: "another")
    assert cache.get("ab", other) is None


@settings(max_examples=60)
@given(data=st.data())
def test_no_damage_gets_through(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    cache = ObjectCache(tmp_path_factory.mktemp("cache"), keyring=MINE)
    cache.put("ab", TARGET, b"some code" * 5)
    entry = only_entry(cache)
    content = bytearray(entry.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "grow", "junk"]))
    if kind == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "grow":
        content += data.draw(st.binary(min_size=1, max_size=40))
    else:
        content[:] = data.draw(st.binary(max_size=200))
    entry.write_bytes(content)
    with pytest.warns(CacheWarning, match=entry.name):
        assert cache.get("ab", TARGET) is None
    cache.put("ab", TARGET, b"new")  # the next compile mends the entry
    assert cache.get("ab", TARGET) == b"new"


def test_an_entry_of_the_former_layout_is_a_miss(
    cache: ObjectCache, recwarn: pytest.WarningsRecorder
) -> None:
    """It has another name: nobody looks at it, and it leaves with the least recently used."""
    body = "\n".join(cache_module._label("ab", TARGET).split("\n")[1:]).encode() + b"old code"
    folder = cache.directory / "objects"
    folder.mkdir()
    (folder / (hashlib.sha256(body[:-8]).hexdigest() + ".rlxo")).write_bytes(b"RLXOBJ01" + body)
    assert cache.get("ab", TARGET) is None and cache.info().entries == 1
    assert not recwarn.list and cache.info().rejected == 0


def test_a_file_of_another_kind_is_not_used(cache: ObjectCache) -> None:
    cache.put("ab", TARGET, b"code")
    entry = only_entry(cache)
    write(entry, PLAN, {}, {"code": b"code"}, [])
    with pytest.warns(CacheWarning, match="not a file of compiled code"):
        assert cache.get("ab", TARGET) is None


@pytest.mark.parametrize("mac", [None, 3, "", "zz", "00" * 32])
def test_a_file_without_a_signature_is_not_used(cache: ObjectCache, mac: object) -> None:
    cache.put("ab", TARGET, b"code")
    entry = only_entry(cache)
    write(entry, CODE, {"label": cache_module._label("ab", TARGET), "mac": mac}, {"code": b"evil"}, [])
    with pytest.warns(CacheWarning, match="not signed with this user's key"):
        assert cache.get("ab", TARGET) is None


def test_a_signature_covers_the_code(cache: ObjectCache) -> None:
    cache.put("ab", TARGET, b"code")
    entry = only_entry(cache)
    good = File(entry, CODE).header["mac"]
    write(entry, CODE, {"label": cache_module._label("ab", TARGET), "mac": good}, {"code": b"evil"}, [])
    with pytest.warns(CacheWarning, match="not signed with this user's key"):
        assert cache.get("ab", TARGET) is None


def test_code_signed_by_somebody_else_is_not_used(cache: ObjectCache) -> None:
    ObjectCache(cache.directory, keyring=YOURS).put("ab", TARGET, b"evil")
    with pytest.warns(CacheWarning, match="not signed with this user's key"):
        assert cache.get("ab", TARGET) is None
    assert cache.info().rejected == 1


def test_good_code_under_another_name_is_not_used(cache: ObjectCache) -> None:
    cache.put("ab", TARGET, b"code of ab")
    stored = only_entry(cache)
    content = stored.read_bytes()
    stored.unlink()
    cache.put("cd", TARGET, b"code of cd")
    only_entry(cache).write_bytes(content)
    with pytest.warns(CacheWarning, match="belongs to other code"):
        assert cache.get("cd", TARGET) is None


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit=40_000, keyring=MINE)  # an entry has 8 KiB
    for number in range(4):
        cache.put(f"{number}", TARGET, bytes(4_000))
        for path in (tmp_path / "objects").iterdir():  # a second passes between two puts
            seconds = path.stat().st_mtime - 1
            os.utime(path, (seconds, seconds))
    assert cache.get("0", TARGET) is not None  # used just now: the oldest is "1"
    cache.put("4", TARGET, bytes(4_000))
    cache.put("5", TARGET, bytes(4_000))
    assert cache.info().nbytes <= 40_000
    assert cache.get("1", TARGET) is None
    assert cache.get("0", TARGET) is not None
    assert cache.get("5", TARGET) is not None


def test_an_object_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, limit=1_000, keyring=MINE)
    cache.put("ab", TARGET, bytes(2_000))
    assert cache.info().entries == 0


def test_unfinished_writes_of_dead_processes_are_swept(cache: ObjectCache) -> None:
    cache.put("ab", TARGET, b"code")
    folder = cache.directory / "objects"
    old, fresh = (unfinished_name(folder / name) for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    ObjectCache(cache.directory, keyring=MINE).put("cd", TARGET, b"code")
    assert fresh.exists()
    assert not old.exists()


def test_a_cache_that_cannot_be_written_warns_once_and_is_still_read(
    cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("ab", TARGET, b"code")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.os, "fsync", refuse)
    monkeypatch.setattr(cache_module.os, "utime", refuse)
    with pytest.warns(CacheWarning, match=r"cannot be written \(Read-only file system\)"):
        cache.put("cd", TARGET, b"code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("ef", TARGET, b"code")
        assert cache.get("ab", TARGET) == b"code"
        assert cache.get("cd", TARGET) is None


def test_a_cache_directory_that_cannot_exist_is_only_a_warning(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    cache = ObjectCache(blocker / "cache", keyring=MINE)
    assert cache.get("ab", TARGET) is None
    with pytest.warns(CacheWarning, match="set RLX_CACHE"):
        cache.put("ab", TARGET, b"code")
    assert cache.info().entries == 0


RACER = """
import sys, warnings
from rlx.target.cpu import resolve
from rlx.runtime.store.cache import ObjectCache
warnings.simplefilter("error")
cache, target, size = ObjectCache(), resolve("x86-64"), 100_000
sys.stdin.readline()
for turn in range(100):
    cache.put("ab", target, bytes([int(sys.argv[1])]) * size)
    found = cache.get("ab", target)
    assert found is not None and len(found) == size and len(set(found)) == 1, "torn entry"
print(cache.ring()._key.hex())
"""


def test_four_processes_write_the_same_key_at_once(tmp_path: Path) -> None:
    """They also race for the signing key, which does not exist before."""
    environment = {
        **os.environ,
        "RLX_CACHE": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(number)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    keys = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(keys) == 1
    files = sorted(path.name for path in (tmp_path / "cache" / "objects").iterdir())
    assert len(files) == 1
    assert not files[0].endswith(".tmp")
    assert [path.name for path in (tmp_path / "config" / "rlx").iterdir()] == ["native.key"]


# --- the key --------------------------------------------------------------------------------------


def test_the_key_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key"
    key = load_or_create(path)
    assert len(key) == 32
    assert load_or_create(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_lost_race_for_the_key_takes_the_winners_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "key", os.link

    def somebody_was_first(source: Path, target: Path) -> None:
        target.write_bytes(b"w" * 32)
        target.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", somebody_was_first)
    assert load_or_create(path) == b"w" * 32
    assert [found.name for found in tmp_path.iterdir()] == ["key"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(TrustError, match="mode 0600"):
        load_or_create(path)


def test_a_key_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"short")
    with pytest.raises(TrustError, match="has 5 bytes"):
        load_or_create(path)


def test_a_key_behind_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    load_or_create(tmp_path / "real")
    (tmp_path / "key").symlink_to(tmp_path / "real")
    with pytest.raises(OSError):
        load_or_create(tmp_path / "key")


@pytest.mark.parametrize("fault", ["open to others", "no directory"])
def test_without_a_key_file_signatures_hold_within_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if fault == "no directory":
        (tmp_path / "rlx").write_text("a file where the directory should be")
    else:
        load_or_create(trust.key_path())
        trust.key_path().chmod(0o644)
    with pytest.warns(TrustWarning, match="this process only"):
        ring = trust.keyring()
    assert trust.keyring() is ring
    assert ring.verify(b"code", ring.sign(b"code"))


def test_a_cache_signs_with_the_key_of_the_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key met while the configuration lay elsewhere does not stick: others would refuse the code."""
    cache = ObjectCache(tmp_path / "cache")
    target = resolve("x86-64")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "elsewhere"))
    cache.put("first", target, b"object")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    cache.put("second", target, b"object")
    assert ObjectCache(tmp_path / "cache").get("second", target) == b"object"
    with pytest.warns(CacheWarning, match="not signed with this user's key"):
        assert cache.get("first", target) is None
