"""Text to tokens and back: tokenizers from the metadata of GGUF files, and tokenizer.json.

Each token stands for bytes; text is what they decode to. Control tokens (<|im_end|>, <s>) are found first,
where the caller allows it: they never come out of ordinary text by merging.
"""

from __future__ import annotations

import codecs
import heapq
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rlx.errors import FormatError, InputError, UnsupportedError, how_to_install
from rlx.files import Json, file_boundary, read_plain
from rlx.llm.gguf import GgufFile
from rlx.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping

Encode = Callable[[str], list[int]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Types of tokens, as GGUF files number them."""

_SPACE = "\u2581"  # what SentencePiece writes for a space
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "deepseek-r1-qwen": (_WORDS + r"\p{N}" + _REST,),
    "tekken": (_CASED % ("", "", r"\p{N}"),),
    "gpt-4o": (_CASED % (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"),),
}
"""How byte-level tokenizers cut text before they merge, by the name that GGUF files have for it."""
_WHOLE_WORDS = ("llama-bpe", "tekken")  # a word that is a token is not merged

_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>", "</s>")

_HARMONY = ("<|return|>", "<|call|>")  # end answers of gpt-oss


@dataclass(frozen=True, eq=False)
class LevelRules:
    """How a byte-level tokenizer works, as data: what cuts the text, which pairs are merged, best first."""

    splits: tuple[str, ...]
    """Regular expressions; each cuts the parts of the one before."""
    merges: Sequence[str]
    whole: bool
    """A part that is a token is not merged."""


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to tokens and back. `encode` and `decode` are all that most users need."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    plain: Encode
    """Tokens of text without control tokens."""
    piece: Callable[[str], bytes]
    """The bytes of a token that is not a control token."""
    begin: int | None
    """The token that every text begins with."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    specials: Mapping[str, int]
    users: Mapping[str, int]
    rules: LevelRules | None = None
    """Of a byte-level tokenizer in a GGUF file."""
    after: tuple[int, ...] = ()
    """Tokens that every text of an encoder ends with."""

    def encode(self, text: str, *, begin: bool = True, control: bool = False) -> list[int]:
        """Tokens of a text; with `control`, control tokens in it are found, as templates need it."""
        found = [self.begin] if begin and self.begin is not None else []
        wanted = {**self.users, **(self.specials if control else {})}
        for part in re.split(self._cut(control), text) if wanted else [text]:
            if part in wanted:
                found.append(wanted[part])
            elif part:
                found += self.plain(part)
        if control and self.begin is not None and found[:2] == [self.begin] * 2:
            del found[0]  # the template has written it, too
        return [*found, *self.after] if begin else found

    def _cut(self, control: bool) -> re.Pattern[str]:
        names = [*self.users, *(self.specials if control else ())]
        return _alternatives(tuple(sorted(names, key=len, reverse=True)))

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; nothing for control tokens."""
        if not 0 <= token < len(self.tokens):
            raise InputError(f"token {token} is not one of the {len(self.tokens)} of this model")
        kind = self.kinds[token]
        if kind in (CONTROL, UNKNOWN, UNUSED):
            return b""
        return self.tokens[token].encode() if kind == USER else self.piece(self.tokens[token])

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.bytes_of(int(token)) for token in tokens).decode("utf-8", "replace")

    def decoder(self) -> Callable[[int | None], str]:
        """A function that takes tokens one by one (at last None) and gives the text that is complete."""
        state = codecs.getincrementaldecoder("utf-8")("replace")

        def add(token: int | None) -> str:
            return state.decode(b"" if token is None else self.bytes_of(token), token is None)

        return add


@cache
def _alternatives(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, names)) + ")")


def _tokenizers() -> ModuleType:
    """The package `tokenizers`, which has the regular expressions of byte-level tokenizers."""
    try:
        import tokenizers
    except ImportError:
        raise UnsupportedError(
            f"this model's tokenizer needs the package tokenizers; {how_to_install('llm')}"
        ) from None
    return tokenizers


# -- bytes of tokens


@cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write for bytes: printable ones stand for themselves.

    >>> _byte_letters()["A"], _byte_letters()["\u0120"]
    (65, 32)
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def level_piece(token: str) -> bytes:
    """The bytes of a token of a byte-level tokenizer.

    >>> level_piece("\u0120caf\u00c3\u00a9").decode()
    ' café'
    """
    letters = _byte_letters()
    found = [letters.get(letter) for letter in token]
    return token.encode() if None in found else bytes(found)  # type: ignore[arg-type]


def sentence_piece(token: str) -> bytes:
    """The bytes of a token of SentencePiece.

    >>> sentence_piece("\u2581a"), sentence_piece("<0x0A>")
    (b' a', b'\\n')
    """
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode("utf-8", "surrogateescape")


# -- SentencePiece


class Pieces:
    """What both of SentencePiece's models share: tokens with scores, and bytes for what is not a token."""

    def __init__(self, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], lead: bool):
        self.ids = {token: i for i, token in enumerate(tokens) if kinds[i] in (NORMAL, USER)}
        self.bytes = {token: i for i, token in enumerate(tokens) if kinds[i] == BYTE}
        self.scores, self.lead = scores, lead
        self.unknown = next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), 0)

    def __call__(self, text: str) -> list[int]:
        marked = (" " * self.lead + text).replace(" ", _SPACE) if text else ""
        found: list[int] = []
        for part in self.parts(marked):
            token = self.ids.get(part)
            spelled = [self.bytes.get(f"<0x{byte:02X}>") for byte in part.encode("utf-8", "surrogateescape")]
            if token is not None:
                found.append(token)
            elif None not in spelled:
                found += spelled  # type: ignore[arg-type]
            elif not (found and found[-1] == self.unknown):
                found.append(self.unknown)
        return found

    def parts(self, text: str) -> list[str]:
        """The text in parts, each of them a token or one character."""
        raise NotImplementedError


class Merging(Pieces):
    """SentencePiece's BPE: of all neighbours that are a token together, the one with the best score first."""

    def parts(self, text: str) -> list[str]:
        """
        >>> Merging(["a", "b", "ab"], [0, 0, -1.0], [1, 1, 1], False).parts("aabb")
        ['a', 'ab', 'b']
        """
        parts: list[str | None] = list(text)
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left < 0 or right >= len(parts):
                return
            joined = str(parts[left]) + str(parts[right])
            token = self.ids.get(joined)
            if token is not None:
                heapq.heappush(queue, (-self.scores[token], left, right, joined))

        for left, right in pairwise(range(len(parts))):
            propose(left, right)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            stale = parts[left] is None or parts[right] is None or after[left] != right
            if stale or str(parts[left]) + str(parts[right]) != joined:
                continue
            parts[left], parts[right] = joined, None
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [part for part in parts if part is not None]


class Likeliest(Pieces):
    """SentencePiece's unigram model: the parts whose scores have the largest sum, added in f32 as there."""

    def parts(self, text: str) -> list[str]:
        """
        >>> Likeliest(["a", "b", "ab"], [-1.0, -1.0, -1.5], [1, 1, 1], False).parts("aab")
        ['a', 'ab']
        """
        longest = max(map(len, self.ids), default=1)
        scores = {token: np.float32(self.scores[i]) for token, i in self.ids.items()}
        odd = np.float32(min(scores.values(), default=0.0)) - np.float32(10)  # of a character without a token
        best: list[tuple[np.float32, int] | None] = [(np.float32(0), 0), *[None] * len(text)]
        for at in range(len(text)):
            here = best[at]
            assert here is not None  # a single character always fits
            for end in range(at + 1, min(at + longest, len(text)) + 1):
                score = scores.get(text[at:end], odd if end == at + 1 else None)
                if score is None:
                    continue
                total, known = here[0] + score, best[end]
                if known is None or total > known[0]:
                    best[end] = (total, at)
        found, end = [], len(text)
        while end:
            _, at = best[end]  # type: ignore[misc]
            found.append(text[at:end])
            end = at
        return found[::-1]


# -- from files


def from_gguf(file: GgufFile, encloses: bool = False) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file; `encloses` is as in `from_json`."""
    kind = file.get("tokenizer.ggml.model", str)
    tokens = file.get("tokenizer.ggml.tokens", list)
    kinds = _array(file, "token_type", len(tokens), NORMAL).astype(int).tolist()

    def token(key: str) -> int | None:
        if f"tokenizer.ggml.{key}_token_id" not in file.metadata:
            return None
        found = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if not 0 <= found < len(tokens):
            raise FormatError(f"{file.path}: the {key} token is {found}, of {len(tokens)}")
        return found

    rules = None
    with file_boundary(file.path, "tokenizer"):
        if kind == "gpt2":
            name = file.get("tokenizer.ggml.pre", str, "default")
            rules = _level_rules(file.path, name, file.get("tokenizer.ggml.merges", list))
            plain, piece = _level_encoder(file.path, rules, tokens), level_piece
        elif kind in ("llama", "t5"):
            scores = _array(file, "scores", len(tokens), 0).astype(float).tolist()
            lead = file.get("tokenizer.ggml.add_space_prefix", bool, True)
            pieces = Merging if kind == "llama" else Likeliest
            plain, piece = _normalised(file, pieces(tokens, scores, kinds, lead)), sentence_piece
        elif kind == "bert":
            plain, piece = _word_pieces(tokens), sentence_piece
        else:
            raise UnsupportedError(
                f"{file.path}: the tokenizer {kind!r} is not supported; RLX reads gpt2, llama, t5 and bert"
            )
    adds = file.get("tokenizer.ggml.add_bos_token", bool, kind == "llama")
    ends = {end for end in map(token, ("eos", "eot", "eom")) if end is not None}
    made = _tokenizer(tokens, kinds, plain, piece, token("bos") if adds else None, ends, rules)
    if not encloses:
        return made
    begin, after = (
        next((found for found in map(token, names) if found is not None), None)
        for names in (("cls", "bos"), ("seperator", "eos"))  # the key is written so
    )
    return replace(made, begin=begin, after=() if after is None else (after,))


def _word_pieces(tokens: Sequence[str]) -> Encode:
    """BERT's tokenizer: words in lower case, cut into the longest pieces that are tokens.

    Files mark what begins a word; the package marks what continues one.
    """
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        special = token.startswith("[") and token.endswith("]")
        inside = token if special else token[1:] if token.startswith(_SPACE) else f"##{token}"
        vocabulary.setdefault(inside, i)
    package = _tokenizers()
    model = package.Tokenizer(package.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    model.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    return _ids(model.encode)


def _tokenizer(
    tokens: Sequence[str],
    kinds: Sequence[int],
    plain: Encode,
    piece: Callable[[str], bytes],
    begin: int | None,
    ends: set[int],
    rules: LevelRules | None = None,
) -> Tokenizer:
    specials = {token: i for i, token in enumerate(tokens) if kinds[i] == CONTROL and token}
    users = {token: i for i, token in enumerate(tokens) if kinds[i] == USER and token}
    names: tuple[str, ...] = _ENDS
    if specials.keys() >= set(_HARMONY):  # there, what <|end|> ends is a part of the answer
        names = (*(name for name in _ENDS if name != "<|end|>"), *_HARMONY)
    named = {specials[name] for name in names if name in specials}
    return Tokenizer(tokens, kinds, plain, piece, begin, frozenset(ends | named), specials, users, rules)


def _array(file: GgufFile, name: str, count: int, default: int) -> np.ndarray:
    """Numbers of the metadata, one for each token."""
    found = file.get(f"tokenizer.ggml.{name}", np.ndarray, np.full(count, default))
    if len(found) != count:
        raise FormatError(f"{file.path}: tokenizer.ggml.{name} has {len(found)} elements for {count} tokens")
    return found


def _level_rules(path: str, name: str, merges: Sequence[str]) -> LevelRules:
    """The rules of a byte-level tokenizer whose text is cut as `name` says."""
    splits = _SPLITS.get("gpt-2" if name == "default" else name)
    if splits is None:
        raise UnsupportedError(
            f"{path}: text cut as {name!r} is not supported; RLX knows {', '.join(_SPLITS)}"
        )
    return LevelRules(splits, merges, name in _WHOLE_WORDS)


def _level_encoder(path: str, rules: LevelRules, tokens: Sequence[str]) -> Encode:
    """Byte-level BPE; the text is cut first."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for merge in rules.merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise FormatError(f"{path}: the merge {merge!r} is not of two tokens to a third")
        pairs.append((left, right))
    package = _tokenizers()
    model = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.whole))
    before = package.pre_tokenizers
    model.pre_tokenizer = before.Sequence(
        [
            *(before.Split(package.Regex(split), "isolated") for split in rules.splits),
            before.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _ids(model.encode)


class _Encoding(Protocol):
    ids: list[int]


def _ids(encode: Callable[..., _Encoding]) -> Encode:
    """The `encode` of a tokenizer of that package, without the tokens that it adds."""

    def ids(text: str) -> list[int]:
        try:
            return encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises nothing more precise, as for words without [UNK]
            raise FormatError(f"the model's tokenizer cannot read a text: {error}") from error

    return ids


def _normalised(file: GgufFile, plain: Encode) -> Encode:
    """An encoder of text whose characters are replaced first, by SentencePiece's compiled rules."""
    rules = file.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if not isinstance(rules, np.ndarray) or not len(rules):
        return plain
    normalise = _tokenizers().normalizers.Precompiled(rules.astype(np.uint8).tobytes()).normalize_str
    return lambda text: plain(normalise(text))


def from_json(path: Path, config: Json, encloses: bool = False) -> Tokenizer:
    """The tokenizer of a tokenizer.json; see `from_json_text`."""
    with file_boundary(path, "tokenizer"):
        text = read_plain(path)
    return from_json_text(str(path), text, config, encloses)


def from_json_text(path: str, text: bytes, config: Json, encloses: bool = False) -> Tokenizer:
    """The tokenizer in the text of a tokenizer.json; `config` is that of tokenizer_config.json. No text is
    cut or padded; `path` is what errors call it.

    With `encloses`, as for an encoder, texts begin and end with the tokens that the file adds.
    """
    package = _tokenizers()
    with file_boundary(path, "tokenizer"):
        model, about = package.Tokenizer.from_str(text.decode()), json.loads(text)
        ids: dict[str, int] = model.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(ids.values(), default=-1) + 1)
        if len(tokens) > 4 * len(ids) + 1024:
            raise FormatError(f"{path}: {len(ids)} tokens have numbers up to {len(tokens)}")
        kinds = [UNUSED] * len(tokens)
        for token, i in ids.items():
            tokens[i], kinds[i] = token, NORMAL
        for added in about.get("added_tokens") or ():
            kinds[added["id"]] = CONTROL if added.get("special") else USER
        level = "ByteLevel" in json.dumps(about.get("decoder"))
        model.no_truncation()
        model.no_padding()
        around: list[int] = model.encode("").ids if encloses else []
    model.encode_special_tokens = True
    piece = level_piece if level else sentence_piece

    def named(key: str) -> int | None:
        value = config.get(key)
        return ids.get(str(value.get("content") if isinstance(value, dict) else value))

    begins = config.get("add_bos_token", not level)
    end = named("eos_token")
    begin = named("bos_token") if begins else None
    made = _tokenizer(tokens, kinds, _ids(model.encode), piece, begin, set() if end is None else {end})
    return replace(made, begin=next(iter(around), None), after=tuple(around[1:])) if encloses else made
