"""Coverage-guided fuzzing of one reader with atheris: `python run.py READER [FOLDERS] [libFuzzer options]`.

docs/fuzzing.md says how to set it up. New inputs are written to the folder named first, or to a temporary
one, and a finding to `crash-*` in the current folder.
"""

from __future__ import annotations

import faulthandler
import sys

import atheris

with atheris.instrument_imports(include=["rlx"]):
    import readers


def main() -> None:
    name, *options = sys.argv[1:]
    if name not in readers.READERS:
        sys.exit(f"no reader {name!r}; there are {', '.join(readers.READERS)}")
    faulthandler.disable()  # libFuzzer has handlers of its own
    itself = f"{sys.executable} {__file__} {name}"  # as libFuzzer starts it again, to merge corpora
    atheris.Setup([itself, *options], lambda data: readers.read(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
