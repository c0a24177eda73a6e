"""The inputs that coverage-guided fuzzing keeps: one archive for each reader.

python tests/fuzz/readers/corpus.py unpack onnx FOLDER
python tests/fuzz/readers/corpus.py pack onnx FOLDER
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # equal inputs are an equal archive


def kept(reader: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of what is kept for a reader."""
    with zipfile.ZipFile(FOLDER / f"{reader}.zip") as archive:
        for name in archive.namelist():
            yield name, archive.read(name)


def unpack(reader: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in kept(reader):
        (folder / name).write_bytes(data)


def pack(reader: str, folder: Path) -> None:
    with zipfile.ZipFile(FOLDER / f"{reader}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(folder.iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name, LONG_AGO), path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    what, reader, folder = sys.argv[1:]
    {"pack": pack, "unpack": unpack}[what](reader, Path(folder))
