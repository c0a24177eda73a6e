"""The zoo against wheels made on the spot: pip finds them in a local folder, no network is used."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx import zoo
from rlx.errors import ZooError
from rlx.zoo import lock, store

WHEEL = "toymodels-1.2-py3-none-any.whl"
CONTENTS = {
    "toymodels/a.onnx": b"model a",
    "toymodels/sub/b.onnx": b"model b",
    "toymodels/note.txt": b"words",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, contents: dict[str, bytes] = CONTENTS) -> bytes:
    path = folder / WHEEL
    info = "toymodels-1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in contents.items():
            wheel.writestr(zipfile.ZipInfo(name), data)
        # A dependency that exists nowhere: the fetcher must not look for it.
        metadata = "Metadata-Version: 2.1\nName: toymodels\nVersion: 1.2\nRequires-Dist: no-such-framework\n"
        wheel.writestr(zipfile.ZipInfo(f"{info}/METADATA"), metadata)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(zipfile.ZipInfo(f"{info}/WHEEL"), tag)
        wheel.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "")
    return path.read_bytes()


def lock_text(wheel: bytes, **changes: str) -> str:
    def file(model: str, name: str, member: str) -> str:
        data = CONTENTS[member]
        return (
            f'[[model.{model}.files]]\nname = "{name}"\nmember = "{member}"\n'
            f'sha256 = "{sha256(data)}"\nsize = {len(data)}\n'
        )

    text = (
        f'format = 1\n[wheel.toymodels]\nversion = "1.2"\nfile = "{WHEEL}"\n'
        f'sha256 = "{sha256(wheel)}"\nsize = {len(wheel)}\n'
        '[model.toy-a]\nwheel = "toymodels"\nlicence = "MIT"\nnote = "first"\n'
        + file("toy-a", "model.onnx", "toymodels/a.onnx")
        + file("toy-a", "note.txt", "toymodels/note.txt")
        + '[model.toy-b]\nwheel = "toymodels"\nlicence = "MIT"\nnote = "second"\n'
        + file("toy-b", "model.onnx", "toymodels/sub/b.onnx")
    )
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole world to pip, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def use_lock(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(text: str) -> None:
        models = lock.parse_lock(text)
        monkeypatch.setattr(zoo, "locked", lambda: models)

    return use


@pytest.fixture
def toy(index: Path, use_lock: Callable[[str], None]) -> Path:
    use_lock(lock_text(make_wheel(index)))
    return index


def leftovers() -> list[str]:
    return sorted(path.name for path in store.root().iterdir() if path.name.startswith(".fetch"))


def test_fetch_unpacks_every_model_of_the_wheel_and_works_offline_afterwards(toy: Path) -> None:
    steps: list[str] = []
    assert not zoo.is_fetched("toy-a")
    path = zoo.fetch("toy-a", notify=steps.append)
    assert path == store.root() / "toy-a-1.2" / "model.onnx"
    assert path.read_bytes() == b"model a"
    assert len(steps) == 2 and WHEEL in steps[0] and "toy-a, toy-b" in steps[1]

    (toy / WHEEL).unlink()
    assert zoo.fetch("toy-a", notify=steps.append) == path
    assert zoo.fetch("toy-b").read_bytes() == b"model b"
    assert zoo.path("toy-a", "note.txt").read_bytes() == b"words"
    zoo.verify("toy-a")
    assert len(steps) == 2
    assert leftovers() == []


def test_a_truncated_file_is_noticed_and_repaired(toy: Path) -> None:
    path = zoo.fetch("toy-a")
    path.write_bytes(b"mod")
    assert not zoo.is_fetched("toy-a")
    with pytest.raises(ZooError, match=r"is missing or incomplete.*run `rlx zoo fetch toy-a`"):
        zoo.path("toy-a")
    assert zoo.fetch("toy-a").read_bytes() == b"model a"
    assert leftovers() == []


def test_verify_finds_a_changed_file(toy: Path) -> None:
    path = zoo.fetch("toy-a")
    path.write_bytes(b"model X")
    with pytest.raises(ZooError, match=r"model\.onnx was changed \(SHA-256 differs\); delete"):
        zoo.verify("toy-a")


def test_another_file_under_the_same_name_is_refused(index: Path, use_lock: Callable[[str], None]) -> None:
    use_lock(lock_text(make_wheel(index)))
    make_wheel(index, {**CONTENTS, "toymodels/a.onnx": b"evil"})
    with pytest.raises(ZooError, match=r"has SHA-256 .*, the lock file wants .* nothing was unpacked"):
        zoo.fetch("toy-a")
    assert not zoo.is_fetched("toy-a")
    assert leftovers() == []


def test_a_member_that_differs_is_refused(index: Path, use_lock: Callable[[str], None]) -> None:
    wheel = make_wheel(index)
    use_lock(lock_text(wheel, **{sha256(b"model a"): "0" * 64}))
    with pytest.raises(ZooError, match=r"'toy-a': toymodels/a\.onnx differs from the lock file"):
        zoo.fetch("toy-a")
    assert not zoo.is_fetched("toy-a")


def test_no_network_is_a_clear_error(toy: Path) -> None:
    (toy / WHEEL).unlink()
    with pytest.raises(ZooError, match=rf"pip could not fetch {WHEEL}: .*; check the network"):
        zoo.fetch("toy-a")
    with pytest.raises(ZooError, match="run `rlx zoo fetch toy-a`"):
        zoo.path("toy-a")


def test_python_without_pip_is_a_clear_error(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ZooError, match=r"needs pip, which .* does not have; run `python -m ensurepip`"):
        zoo.fetch("toy-a")


def test_cache_that_cannot_be_written(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ZooError, match=r"cannot write the model cache .*; free the space or set RLX_CACHE"):
        zoo.fetch("toy-a")


def test_unknown_names(toy: Path) -> None:
    with pytest.raises(ZooError, match=r"the zoo has no model 'toy-c'; did you mean toy-b or toy-a\?"):
        zoo.fetch("toy-c")
    with pytest.raises(ZooError, match=r"has no file 'x'; it has model\.onnx, note\.txt"):
        zoo.path("toy-a", "x")


def test_processes_that_fetch_at_once_download_once(index: Path, tmp_path: Path) -> None:
    text = tmp_path / "lock.toml"
    text.write_text(lock_text(make_wheel(index)))
    code = (
        "import sys; from pathlib import Path; from rlx import zoo; from rlx.zoo import lock\n"
        "models = lock.parse_lock(Path(sys.argv[1]).read_text()); zoo.locked = lambda: models\n"
        "steps = []; zoo.fetch('toy-a', notify=steps.append); print(len(steps))"
    )
    command = [sys.executable, "-c", code, str(text)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = sorted(int(process.communicate(timeout=300)[0]) for process in started)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert printed == [0, 0, 2]  # one did both steps, the others found the work done
    assert leftovers() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format = 1": "format = 9"}, "format 9; this version of RLX reads 1"),
        ({"format = 1": "format = "}, "malformed: TOMLDecodeError"),
        ({'licence = "MIT"': 'license = "MIT"'}, "malformed: KeyError: 'licence'"),
        ({'name = "note.txt"': 'name = "../note.txt"'}, "'../note.txt', which is not a plain file name"),
        ({'wheel = "toymodels"': 'wheel = "others"'}, "malformed: KeyError: 'others'"),
        ({sha256(b"model a"): "abc"}, "'abc' where a SHA-256 in hex must be"),
    ],
)
def test_malformed_lock(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ZooError, match=message):
        lock.parse_lock(lock_text(b"", **changes))


def test_the_shipped_lock_has_the_promised_models() -> None:
    wanted = (
        "minilm magika silero-ifless silero-op15 silero ppocr-det ppocr-rec ppocr-cls basic-pitch whisper80"
    )
    ids = [model.id for model in zoo.models() if model.kind == "model"]
    assert ids == [*wanted.split(), "whisper80-conv", "open-nsfw"]
    assert [model.id for model in zoo.models() if model.kind == "data"] == ["page", "beckett", "asv"]
    assert [model.id for model in zoo.models() if model.kind == "language"] == ["smollm2"]
    for model in zoo.models():
        assert model.wheel.file.split("-")[1] == model.wheel.version
        assert model.licence and model.note and model.size > 0


def test_wheels_of_one_platform_are_asked_for_by_their_own_tags() -> None:
    assert store._tag_options(zoo.model("page").wheel) == [
        *("--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"),
        *("--platform", "manylinux_2_24_x86_64", "--platform", "manylinux_2_28_x86_64"),
    ]
    assert store._tag_options(zoo.model("magika").wheel) == [
        *("--implementation", "py", "--abi", "none", "--platform", "any")
    ]


def test_a_real_model_is_what_the_lock_says(zoo_path: Callable[..., Path]) -> None:
    assert zoo_path("basic-pitch").name == "model.onnx"
    zoo.verify("basic-pitch")
