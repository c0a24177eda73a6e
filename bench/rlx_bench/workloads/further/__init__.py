"""Networks beyond the zoo, with fixed seeds: one ONNX file each, which all engines read.

A file is written when it is first asked for, into the folder `networks` of the cache. Its name has a digest
of the code that writes it and of the sizes, so files never go stale.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.config import CACHE
from rlx.errors import ConfigError
from rlx.files import replacing
from rlx.records import dataclass
from rlx.zoo import onnx_writer
from rlx_bench.workloads import networks as decoders
from rlx_bench.workloads.base import Arrays, Workload
from rlx_bench.workloads.further import convnets, layers, others, recurrent, transformers
from rlx_bench.workloads.further.layers import Made


@dataclass(frozen=True)
class Network:
    """How to build a network, and the sizes at which the NumPy reference takes a moment."""

    build: Callable[..., Made]
    small: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    """Largest difference from the reference, relative to the largest value."""
    dtype: str = "f32"
    """Of the operands of most products."""


BYTES = 16 / 255
"""Where bytes are in between: what is at the half between two may be rounded either way, in every layer."""

_TEXT = {"width": 32, "heads": 4, "layers": 2}

NETWORKS: dict[str, Network] = {
    "mobilenet-v3": Network(convnets.mobilenet_v3, {"size": 64, "width": 0.5}),
    "efficientnet-b0": Network(convnets.efficientnet_b0, {"size": 64, "width": 0.5}),
    "convnext-t": Network(convnets.convnext, {"size": 64, "width": 16, "depths": (1, 1, 2, 1)}),
    "vgg-16": Network(convnets.vgg16, {"size": 32, "width": 8, "hidden": 64}),
    "unet-256": Network(convnets.unet, {"size": 32, "width": 8}),
    "c3d": Network(convnets.c3d, {"frames": 16, "size": 32, "width": 8, "hidden": 64}),
    "yolo": Network(convnets.yolo, {"size": 96, "width": 8}),
    "vit-b16": Network(transformers.vit, {"size": 64, **_TEXT}),
    "bert-base-s512": Network(transformers.bert, {"length": 40, "vocabulary": 99, **_TEXT}),
    "whisper-encoder": Network(transformers.whisper_encoder, {"frames": 90, **_TEXT}),
    "wav2vec2": Network(transformers.wav2vec2, {"samples": 8000, "filters": 32, **_TEXT}),
    "t5-encoder": Network(transformers.t5_encoder, {"length": 33, "vocabulary": 99, **_TEXT}),
    "llama-100m": Network(
        transformers.llama, {"length": 40, "inner": 48, "groups": 2, "vocabulary": 99, **_TEXT}
    ),
    "gpt2-prefill": Network(transformers.gpt2, {"length": 16, "layers": 1, "vocabulary": 99}),
    "unet-block": Network(
        transformers.unet_block,
        {"size": 12, "channels": 32, "groups": 8, "heads": 4, "text": 9, "context": 24},
    ),
    "bilstm": Network(recurrent.bilstm, {"steps": 20, "hidden": 24, "vocabulary": 99}),
    "bigru": Network(recurrent.bigru, {"steps": 20, "hidden": 24, "vocabulary": 99}),
    "crnn": Network(recurrent.crnn, {"columns": 64, "width": 8, "hidden": 24}),
    "byte-lstm": Network(
        recurrent.byte_lstm, {"steps": 9, "width": 24, "hidden": 16}, tolerance=BYTES, dtype="i8"
    ),
    "qdq-transformer": Network(
        others.qdq_transformer,
        {"length": 24, "width": 32, "heads": 4, "layers": 2},
        tolerance=BYTES,
        dtype="i8",
    ),
    "int4": Network(others.int4, {"width": 128}),
    "mlp-64-widths": Network(others.mlp_of_widths, {"layers": 9, "least": 16, "step": 4}),
    "trees-b1": Network(others.trees, {"count": 20, "depth": 4, "features": 8}),
    "trees-b1000": Network(
        others.trees, {"rows": 33, "count": 20, "depth": 4, "features": 8}, sizes={"rows": 1000}
    ),
}


@dataclass(frozen=True)
class Files:
    """A network in the cache."""

    model: Path
    feed: Arrays
    flops: float


def check_name(name: str) -> None:
    """Refuse a network that does not exist."""
    if name not in NETWORKS:
        raise ConfigError(f"unknown network {name!r}; use one of {', '.join(NETWORKS)}")


def files(name: str, small: bool = False) -> Files:
    """The file of a network, what it is fed with, and how many flops its products have."""
    check_name(name)
    network = NETWORKS[name]
    folder = CACHE.get() / "networks"
    sizes = {**network.sizes, **(network.small if small else {})}
    stem = f"{name}{'-small' if small else ''}-{_digest(network.build, sizes)}"
    model, feed, facts = (folder / f"{stem}.{ending}" for ending in ("onnx", "npz", "json"))
    if not facts.exists():  # which is written last
        made = network.build(**sizes)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(model) as file:
            file.write(made.model.SerializeToString(deterministic=True))
        with replacing(feed) as file:
            np.savez(file, allow_pickle=False, **made.feed)
        with replacing(facts) as file:
            file.write(json.dumps({"flops": made.flops}).encode())
    with np.load(feed) as stored:
        arrays = {key: stored[key] for key in stored.files}
    return Files(model, arrays, json.loads(facts.read_text())["flops"])


def _digest(build: Callable[..., Made], sizes: Mapping[str, Any]) -> str:
    """Of what decides what is in a file."""
    modules = (sys.modules[build.__module__], layers, decoders, onnx_writer)
    found = hashlib.sha256(f"{build.__name__} {sorted(sizes.items())}".encode())
    for module in modules:
        assert module.__file__ is not None
        found.update(Path(module.__file__).read_bytes())
    return found.hexdigest()[:12]


def workload(name: str, small: int = 0) -> Workload:
    """A network as a row; with small=1 at the sizes of the tests."""
    found = files(name, bool(small))

    def model() -> Any:
        import onnx

        return onnx.load(str(found.model))

    return Workload(
        f"{name} small" if small else name,
        found.feed,
        ("onnxruntime", "openvino"),
        model,
        path=found.model,
        flops=found.flops,
        tolerance=NETWORKS[name].tolerance,
        dtype=NETWORKS[name].dtype,
    )


MAKERS: dict[str, Callable[..., Workload]] = {
    f"net-{name}": functools.partial(workload, name) for name in NETWORKS
}
