"""A small random language model with a tokenizer of single letters and a chat template, as a folder."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_decoders as tiny
import tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)


def write_tokenizer(folder: Path) -> None:
    words = ["<|im_start|>", "<|im_end|>", *map(chr, range(32, 96)), *map(chr, range(97, 126)), "\n"]
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True)
    )
    model.add_special_tokens(words[:2])
    model.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_chat_model(folder: Path, **changes: object) -> Path:
    """A Llama of one layer; `changes` are of its config."""
    config = {**tiny.CONFIGS["llama"], "num_hidden_layers": 1, **changes}
    tiny.write_folder(folder, config, tiny.random_weights(config))
    write_tokenizer(folder)
    return folder
