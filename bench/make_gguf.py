"""GGUF files with the shapes of known models and random weights: what takes time does not depend on values.

    python bench/make_gguf.py smollm2-135m Q4_0 model.gguf
    python bench/make_gguf.py --f32-of model.gguf f32.gguf     # the same weights, written as f32

The `gguf` package writes them. It cannot write Q4_K_M; llama.cpp's own quantiser does, from a file in f32.
Norms are f32, and the table of tokens of Q4_0 has 8 bits. Vocabularies are that of zoo:smollm2, filled up
with tokens that no text has.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlx import config, zoo
from rlx.llm.gguf import open_gguf
from rlx.records import dataclass

FORMATS = ("Q4_0", "Q8_0", "Q4_K_M", "bf16", "f32")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder whose table of tokens is also its head."""

    architecture: str
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    rope: float


SHAPES = {
    "tiny": Shape("llama", 2, 64, 128, 4, 2, 16, 256, 1e4),
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 1e5),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1e6),
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 5e5),
}


def tensors(shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Names and random weights in f32, the same in every run."""
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        found = random.standard_normal((rows, columns), np.float32)
        return np.asarray(found / np.float32(columns**0.5))

    inner, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    yield "token_embd.weight", matrix(shape.vocabulary, shape.width)
    for i in range(shape.layers):
        for name, rows, columns in (
            ("attn_q", inner, shape.width),
            ("attn_k", kv, shape.width),
            ("attn_v", kv, shape.width),
            ("attn_output", shape.width, inner),
            ("ffn_gate", shape.hidden, shape.width),
            ("ffn_up", shape.hidden, shape.width),
            ("ffn_down", shape.width, shape.hidden),
        ):
            yield f"blk.{i}.{name}.weight", matrix(rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{i}.{name}.weight", np.ones(shape.width, np.float32)
        if shape.architecture == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"blk.{i}.{name}.weight", np.ones(shape.head, np.float32)
    yield "output_norm.weight", np.ones(shape.width, np.float32)


def make(name: str, format: str, path: Path) -> Path:
    """Write the shape of that name in a format."""
    if format == "Q4_K_M":
        from rlx_bench.llm.llama_cpp import quantize

        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            quantize(make(name, "f32", Path(work) / "f32.gguf"), path, format)
        return path
    import gguf

    shape = SHAPES[name]
    writer = gguf.GGUFWriter(str(path), shape.architecture, use_temp_file=True)
    writer.add_name(f"{name} with random weights")
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    kinds = gguf.GGMLQuantizationType
    kind = {"Q4_0": kinds.Q4_0, "Q8_0": kinds.Q8_0, "bf16": kinds.BF16, "f32": kinds.F32}[format]
    writer.add_file_type({"Q4_0": 2, "Q8_0": 7, "bf16": 32, "f32": 0}[format])
    if name == "tiny":
        writer.add_tokenizer_model("none")
    else:
        _add_vocabulary(writer, shape.vocabulary)
    for tensor, values in tensors(shape):
        own = kinds.F32 if values.ndim == 1 else kind
        if tensor == "token_embd.weight" and kind == kinds.Q4_0:
            own = kinds.Q8_0
        data = values if own == kinds.F32 else gguf.quants.quantize(values, own)
        writer.add_tensor(tensor, data, raw_dtype=own)
    _finish(writer)
    return path


def _add_vocabulary(writer, count: int) -> None:
    """The tokenizer of zoo:smollm2 with more tokens."""
    known = open_gguf(zoo.fetch("smollm2")).metadata
    tokens, types = list(known["tokenizer.ggml.tokens"]), list(map(int, known["tokenizer.ggml.token_type"]))
    unused = 5
    writer.add_tokenizer_model(known["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(known["tokenizer.ggml.pre"])
    writer.add_token_list(tokens + [f"<unused {i}>" for i in range(len(tokens), count)])
    writer.add_token_types(types + [unused] * (count - len(tokens)))
    writer.add_token_merges(known["tokenizer.ggml.merges"])
    writer.add_bos_token_id(known["tokenizer.ggml.bos_token_id"])
    writer.add_eos_token_id(known["tokenizer.ggml.eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(known["tokenizer.chat_template"])


def _finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_f32(source: Path, target: Path) -> Path:
    """The same model with its weights written as f32, as the `gguf` package reads them."""
    import gguf

    read = gguf.GGUFReader(str(source))
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture, use_temp_file=True)
    for name, field in read.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(
            name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
        )
    writer.add_file_type(0)
    for tensor in read.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values)
    _finish(writer)
    return target


def made(name: str, format: str) -> Path:
    """A file in RLX's cache, written when it is first asked for."""
    place = config.CACHE.get() / "bench" / "gguf"
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}-{format}.gguf"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=place) as work:
            make(name, format, Path(work) / "model.gguf").rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=SHAPES)
    parser.add_argument("format", nargs="?", choices=FORMATS)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--f32-of", type=Path, metavar="GGUF", help="write the weights of this file as f32")
    args = parser.parse_args()
    if (args.f32_of is None) == (args.format is None):
        parser.error("give a shape and a format, or --f32-of")
    args.path.parent.mkdir(parents=True, exist_ok=True)
    written = as_f32(args.f32_of, args.path) if args.f32_of else make(args.shape, args.format, args.path)
    sys.stdout.write(f"{written}: {written.stat().st_size / (1 << 20):.1f} MiB\n")


if __name__ == "__main__":
    main()
