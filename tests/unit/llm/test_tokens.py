"""Tokenizers that the test trains, as GGUF files and tokenizer.json have them, against their makers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.llm import tokens
from rlx.llm.gguf import GgufFile, open_gguf
from rlx.llm.tokens import BYTE, CONTROL, NORMAL, UNKNOWN, USER, Tokenizer

TEXTS = (
    "The quick brown fox doesn't jump over 1234 lazy dogs; it's 3.14 o'clock.",
    "def f(x):\n    return x**2  # squared\n\n\tprint('été', \"naïve\")",
    "日本語のテキスト と emoji 😀👍🏽, привет мир, שלום, \u200b\ufeff",
    "AAA aaa aA Aa   spaces\t\ttabs\r\nnew lines\n\n\nand more...!!! 100,000.00€",
)
LETTERS = [
    *"abcdefgh XYZ 0123456789 .,;!?'\"\n\t-_/",
    " ",
    "é",
    "ß",
    "中",
    "文",
    "😀",
    "\u0301",
    "\u00a0",
    "'s",
]


def strings(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(LETTERS, rng.integers(0, 30))) for _ in range(count)]


def write(path: Path, kind: str, words: list[str], kinds: list[int], **more: Any) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    for name, value in more.items():
        if isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return open_gguf(path)


# -- byte-level


def trained_bpe() -> Any:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    before = tokenizers.pre_tokenizers
    model.pre_tokenizer = before.Sequence([before.Digits(individual_digits=True), before.ByteLevel(False)])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=before.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([*TEXTS * 4, *strings(200, 5)], trainer)
    return model


@pytest.fixture(scope="module")
def bpe() -> Any:
    return trained_bpe()


def gguf_of_bpe(path: Path, model: Any, **more: Any) -> Tokenizer:
    about = json.loads(model.to_str())["model"]
    words = sorted(about["vocab"], key=about["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in about["merges"]]
    kinds = [CONTROL if word.startswith("<|") else NORMAL for word in words]
    more = {"pre": "smollm", "eos_token_id": 2, "merges": merges, **more}
    return tokens.from_gguf(write(path, "gpt2", words, kinds, **more))


def check_equal(ours: Tokenizer, theirs: Any, count: int) -> None:
    for text in [*TEXTS, *strings(count)]:
        want = theirs(text)
        assert ours.encode(text, begin=False) == want, text
        assert ours.decode(want) == text


def test_byte_level_tokens_of_gguf_files(bpe: Any, tmp_path: Path) -> None:
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe)
    check_equal(ours, lambda text: bpe.encode(text, add_special_tokens=False).ids, 500)


@pytest.mark.slow
def test_ten_thousand_byte_level_strings(bpe: Any, tmp_path: Path) -> None:
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe)
    check_equal(ours, lambda text: bpe.encode(text, add_special_tokens=False).ids, 10_000)


def test_control_tokens_are_found_only_where_they_may_be(bpe: Any, tmp_path: Path) -> None:
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe)
    text = "<|im_start|>user\nhi<|im_end|>"
    inside = ours.encode(text, control=True)
    assert inside[0] == 1 and inside[-1] == 2
    assert ours.decode(inside) == "user\nhi", "control tokens have no text"
    plain = ours.encode(text)
    assert not {0, 1, 2} & set(plain) and ours.decode(plain) == text
    assert ours.ends == {0, 2}


def test_a_text_begins_once(bpe: Any, tmp_path: Path) -> None:
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe, bos_token_id=1, add_bos_token=True)
    assert ours.encode("a")[0] == 1 and ours.encode("a", begin=False)[0] != 1
    assert ours.encode("<|im_start|>a", control=True).count(1) == 1


def test_text_comes_out_when_it_is_whole(bpe: Any, tmp_path: Path) -> None:
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe)
    text = "🦜 ŵ 語"
    add = ours.decoder()
    parts = [add(token) for token in ours.encode(text)]
    assert "".join(parts) + add(None) == text and "\ufffd" not in "".join(parts)
    assert "" in parts, "a character of several tokens"
    broken = ours.decoder()
    assert broken(ours.encode("🦜")[0]) + broken(None) == "\ufffd"
    with pytest.raises(InputError, match="token 500000 is not one of the"):
        ours.bytes_of(500_000)


def test_tokenizer_json(bpe: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    bpe.save(str(path))
    ours = tokens.from_json(path, {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}})
    check_equal(ours, lambda text: bpe.encode(text, add_special_tokens=False).ids, 100)
    text = "<|im_start|>user<|im_end|>"
    assert ours.encode(text, control=True)[::2][0] == 1
    assert ours.decode(ours.encode(text)) == text
    assert ours.begin is None and ours.ends == {0, 2}


SPLITS = {
    "llama-bpe": ("I've 12345", ["I", "'ve", " ", "123", "45"]),
    "qwen2": ("I'VE 123 x\n\n y", ["I", "'VE", " ", "1", "2", "3", " x", "\n\n", " y"]),
    "gpt-2": ("it's  12 x", ["it", "'s", " ", " 12", " x"]),
    "tekken": ("HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    "gpt-4o": ("HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    "smollm": ("x 12", ["x", " ", "1", "2"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_text_is_cut(name: str, bpe: Any, tmp_path: Path) -> None:
    text, parts = SPLITS[name]
    ours = gguf_of_bpe(tmp_path / "t.gguf", bpe, pre=name)
    want = [token for part in parts for token in ours.encode(part, begin=False)]
    assert ours.encode(text, begin=False) == want


# -- SentencePiece


def trained_pieces(folder: Path, kind: str) -> Any:
    text = folder / "text.txt"
    text.write_text("\n".join([*TEXTS * 20, *(s.replace("\n", " ") for s in strings(500, 3))]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "m"),
        vocab_size=450,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def gguf_of_pieces(path: Path, model: Any, kind: str) -> Tokenizer:
    def type_of(i: int) -> int:
        if model.is_unknown(i):
            return UNKNOWN
        if model.is_control(i):
            return CONTROL
        return BYTE if model.is_byte(i) else USER if model.id_to_piece(i) == "<tool>" else NORMAL

    count = model.get_piece_size()
    words = [model.id_to_piece(i) for i in range(count)]
    scores = [model.get_score(i) for i in range(count)]
    more = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2}
    return tokens.from_gguf(write(path, kind, words, [type_of(i) for i in range(count)], **more))


def check_pieces(ours: Tokenizer, model: Any, count: int) -> None:
    for text in [*TEXTS, *strings(count)]:
        want = model.encode(text)
        assert ours.encode(text, begin=False) == want, text
        assert ours.decode(want) == (" " + text if text else "")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(kind: str, tmp_path: Path) -> None:
    model = trained_pieces(tmp_path, kind)
    ours = gguf_of_pieces(tmp_path / "t.gguf", model, "llama" if kind == "bpe" else "t5")
    check_pieces(ours, model, 300)
    if kind == "bpe":
        assert ours.begin == 1 and 2 in ours.ends


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ten_thousand_strings_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    model = trained_pieces(tmp_path, kind)
    check_pieces(
        gguf_of_pieces(tmp_path / "t.gguf", model, "llama" if kind == "bpe" else "t5"), model, 10_000
    )


# -- refusals


def test_tokenizers_that_are_refused(tmp_path: Path) -> None:
    def file(kind: str = "gpt2", **more: Any) -> GgufFile:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        return write(path, kind, ["a", "b", "ab"], [NORMAL] * 3, **more)

    cases: list[tuple[GgufFile, type[Exception], str]] = [
        (
            file("rwkv"),
            UnsupportedError,
            "the tokenizer 'rwkv' is not supported",
        ),
        (file(pre="odd", merges=["a b"]), UnsupportedError, "text cut as 'odd' is not supported"),
        (file(merges=["a c"]), FormatError, "the merge 'a c' is not of two tokens to a third"),
        (file(merges=["ab"]), FormatError, "the merge 'ab' is not of two tokens"),
        (file(merges=["a b"], eos_token_id=3), FormatError, "the eos token is 3, of 3"),
        (file("llama", scores=[0.0]), FormatError, "scores has 1 elements for 3 tokens"),
        (file(), FormatError, "has no 'tokenizer.ggml.merges'"),
    ]
    for opened, error, message in cases:
        with pytest.raises(error) as raised:
            tokens.from_gguf(opened)
        assert message in str(raised.value) and opened.path in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"model": 1}', '{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}'],
)
def test_a_tokenizer_json_that_is_damaged(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        tokens.from_json(path, {})


@pytest.mark.parametrize("names", [("<|return|>", "<|call|>", "<|end|>"), ("<|end|>",)])
def test_what_ends_an_answer(names: tuple[str, ...], tmp_path: Path) -> None:
    """<|end|> ends an answer of Phi-3, but only a part of one of gpt-oss."""
    from tokenizers import Tokenizer, models  # heavy

    model = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    model.add_special_tokens(list(names))
    model.save(str(tmp_path / "tokenizer.json"))
    found = tokens.from_json(tmp_path / "tokenizer.json", {})
    ends = {found.tokens[i] for i in found.ends}
    assert ends == ({"<|return|>", "<|call|>"} if len(names) == 3 else {"<|end|>"})
