"""Exports small torch architectures with random weights to ONNX, with inputs and expected outputs.

    python bench/torch_exports.py FOLDER [NAME ...]

Needs torch, transformers and onnxscript. For each name it writes NAME.onnx and NAME.npz; arrays of the
latter are called `<case>.<input>` and `<case>.y`, the cases differing in batch and length: one program, made
with dynamic shapes, serves them all.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[..., tuple[Any, ...]]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "hidden_size": 64}
EAGER = {"attn_implementation": "eager"}
TEXTS = [(2, 7), (3, 11), (1, 4)]
IMAGES = [(2,), (3,), (1,)]


def build(name: str) -> tuple[Any, list[str], Make, Sequence[tuple[int, ...]]]:
    """The model, its inputs' names, a function that draws inputs, and the sizes to draw."""
    import torch
    import transformers as hf

    def tokens(batch: int, length: int) -> tuple[Any, ...]:
        return torch.randint(0, 99, (batch, length)), torch.ones(batch, length, dtype=torch.long)

    text = ["input_ids", "attention_mask"]
    if name == "bert":
        return hf.BertModel(hf.BertConfig(vocab_size=99, **SMALL, **EAGER)), text, tokens, TEXTS
    if name == "gpt2":
        config = hf.GPT2Config(vocab_size=99, n_embd=64, n_layer=2, n_head=4, use_cache=False, **EAGER)
        return hf.GPT2LMHeadModel(config), text, tokens, TEXTS
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=99, num_key_value_heads=2, use_cache=False, **SMALL, **EAGER)
        return hf.LlamaForCausalLM(config), text, tokens, TEXTS
    if name == "vit":
        config = hf.ViTConfig(image_size=32, patch_size=8, **SMALL, **EAGER)
        return hf.ViTModel(config), ["pixel_values"], lambda b: (torch.randn(b, 3, 32, 32),), IMAGES
    if name == "resnet":
        config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1])
        return hf.ResNetModel(config), ["pixel_values"], lambda b: (torch.randn(b, 3, 64, 64),), IMAGES
    if name == "whisper":
        sizes = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        sizes |= {"d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 128}
        config = hf.WhisperConfig(num_mel_bins=80, max_source_positions=100, **sizes, **EAGER)
        encoder = hf.WhisperModel(config).encoder
        return encoder, ["input_features"], lambda b: (torch.randn(b, 80, 200),), IMAGES
    raise SystemExit(f"no architecture is called {name!r}; there are {', '.join(NAMES)}")


NAMES = ("bert", "gpt2", "llama", "vit", "resnet", "whisper")


def export(name: str, folder: Path) -> None:
    """Write NAME.onnx and NAME.npz."""
    import torch

    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    inner, names, make, sizes = build(name)

    class First(torch.nn.Module):
        """The main output of a model, as the only one."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Any:
            out = self.inner(**dict(zip(names, args, strict=True)))
            return out.logits if hasattr(out, "logits") else out.last_hidden_state

    model = First().eval()
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seq", min=2, max=512)
    dynamic = tuple({0: batch, 1: length} if len(sizes[0]) == 2 else {0: batch} for _ in names)
    torch.onnx.export(
        model,
        make(*sizes[0]),
        str(folder / f"{name}.onnx"),
        dynamo=True,
        input_names=names,
        output_names=["y"],
        dynamic_shapes=(dynamic,),
        external_data=False,
        verbose=False,
    )
    arrays: dict[str, np.ndarray] = {}
    for i, size in enumerate(sizes):
        args = make(*size)
        with torch.no_grad():
            arrays[f"{i}.y"] = model(*args).numpy()
        arrays |= {f"{i}.{n}": a.numpy() for n, a in zip(names, args, strict=True)}
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or NAMES:
        export(name, folder)
        print(f"{name}: {folder / name}.onnx")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
