"""Names of exported programs: identifiers of C, and prefixes that keep two programs in one binary apart."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence

from rlx.errors import ConfigError

_DEFINED = re.compile(r"^define [^@]*@([\w.$-]+)\(", re.M)
_NAME = re.compile(r"@([\w.$-]+)")
_C_WORDS = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if inline int "
    "long register restrict return short signed sizeof static struct switch typedef union unsigned void "
    "volatile while bool true false main".split()
)


def checked_name(name: str) -> str:
    """A name that C and JavaScript take, or an error.

    >>> checked_name("minilm")
    'minilm'
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.A) or name in _C_WORDS or keyword.iskeyword(name):
        raise ConfigError(
            f"name {name!r} is not an identifier of C; give letters, digits and underscores, such as "
            f"{identifier(name)!r}"
        )
    return name


def identifier(text: str) -> str:
    """An identifier made of any text.

    >>> identifier("all-MiniLM L6"), identifier("3d"), identifier("int")
    ('all_MiniLM_L6', 'model_3d', 'model_int')
    """
    made = re.sub(r"\W+", "_", text, flags=re.A).strip("_")
    if not made or not made[0].isalpha() or made in _C_WORDS or keyword.iskeyword(made):
        made = f"model_{made}".rstrip("_")
    return made


def renamed(texts: Sequence[str], name: str, public: Sequence[str]) -> list[str]:
    """Modules of LLVM IR in which all functions begin with the name of the program: `rlx_run`, if it is
    public, becomes NAME_run; all others become NAME.function and are hidden.

    >>> print(renamed(["define void @k0() {\\n  call void @f()\\n}"], "net", [])[0])
    define hidden void @net.k0() {
      call void @f()
    }
    """
    defined = {found for text in texts for found in _DEFINED.findall(text)}
    names = {n: f"{name}.{n}" for n in defined if n not in public}
    names |= {n: f"{name}_{n.removeprefix('rlx_')}" for n in public}

    def one(text: str) -> str:
        text = _NAME.sub(lambda m: f"@{names.get(m[1], m[1])}", text)
        return re.sub(rf"^define (?!hidden|internal)(?=[^@]*@{name}\.)", "define hidden ", text, flags=re.M)

    return [one(text) for text in texts]
