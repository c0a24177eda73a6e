"""How the features of a text's tokens become one vector, as sentence-transformers' folders say it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlx.errors import FormatError, UnsupportedError
from rlx.files import Json, file_boundary, read_plain
from rlx.llm.gguf import GgufFile
from rlx.llm.hf import read_json
from rlx.records import dataclass

POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda features: features.mean(axis=0),
    "cls": lambda features: features[0],
    "max": lambda features: features.max(axis=0),
    "lasttoken": lambda features: features[-1],
}
_OLD_NAMES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_GGUF_MODES = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken"}  # 0: the file leaves it to who reads it
_MODULE = "sentence_transformers."


@dataclass(frozen=True)
class Pooling:
    """The mean of the features, those of the first or last token, or the largest; perhaps of length 1.

    >>> features = np.array([[3.0, 0.0], [3.0, 8.0]], np.float32)
    >>> Pooling()(features).tolist()
    [0.6000000238418579, 0.800000011920929]
    >>> Pooling("max", normalised=False)(features).tolist()
    [3.0, 8.0]
    """

    mode: str = "mean"
    normalised: bool = True

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """The vector of features [tokens, width]."""
        wide = features.astype(np.float64)
        found = POOLS[self.mode](wide)
        if self.normalised:
            found = found / max(float(np.linalg.norm(found)), 1e-12)
        return np.asarray(found, np.float32)


MEAN = Pooling()


def pooling_of(folder: Path) -> Pooling:
    """What a folder says; without a modules.json it is the mean, of length 1."""
    path = folder / "modules.json"
    if not path.exists():
        return MEAN
    pooling = Pooling(normalised=False)
    for place, kind in _modules(path):
        if kind == "Pooling":
            pooling = Pooling(_mode(folder, place), pooling.normalised)
        elif kind == "Normalize":
            pooling = Pooling(pooling.mode, True)
        elif kind != "Transformer":
            raise UnsupportedError(f"{path}: the module {kind!r} is not one of Pooling and Normalize")
    return pooling


def _modules(path: Path) -> list[tuple[str, str]]:
    """Folders and kinds of the modules that a text goes through."""
    with file_boundary(path, "list of modules"):
        given = json.loads(read_plain(path))
        found = [(str(one["path"]), str(one["type"])) for one in given]
    for place, kind in found:
        if Path(place).name != place and place:
            raise FormatError(f"{path}: module {kind!r} is in {place!r}, which is not a folder next to it")
    return [(place, kind.removeprefix(_MODULE).rpartition(".")[2]) for place, kind in found]


def _mode(folder: Path, place: str) -> str:
    path = folder / place / "config.json"
    about: Json = read_json(path)
    named = about.get("pooling_mode")
    modes = [mode for key, mode in _OLD_NAMES.items() if about.get(key) is True] if named is None else [named]
    if len(modes) != 1 or modes[0] not in POOLS:
        raise UnsupportedError(f"{path}: pooling by {modes} is not one of {', '.join(POOLS)}")
    return str(modes[0])


def longest_of(folder: Path) -> int | None:
    """Tokens of the longest text that the model is meant for, if the folder says so."""
    path = folder / "sentence_bert_config.json"
    if not path.exists():
        return None
    found = read_json(path).get("max_seq_length")
    if found is not None and (type(found) is not int or found < 1):
        raise FormatError(f"{path}: max_seq_length is {found!r}")
    return found


def gguf_pooling(file: GgufFile, kind: str) -> Pooling:
    """What a GGUF file says."""
    number = file.get(f"{kind}.pooling_type", int, 1)
    if number not in _GGUF_MODES:
        raise UnsupportedError(f"{file.path}: pooling of type {number} is none of 1, 2 and 3")
    return Pooling(_GGUF_MODES[number])
