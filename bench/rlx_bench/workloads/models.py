"""Whole models: the MiniLM encoder, ResNet-50, a GPT-2 decoder, an LSTM, Whisper's front end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from rlx_bench.workloads.base import Arrays, Run, Workload, normal, rng
from rlx_bench.workloads.further.layers import Layers
from rlx_bench.workloads.networks import gpt2_model, lstm_model, resnet50_model

ALL = ("onnxruntime", "openvino", "torch", "jax")


def _minilm_feed(batch: int, seq: int) -> Arrays:
    return {
        "input_ids": rng().integers(1000, 30000, (batch, seq)),
        "attention_mask": np.ones((batch, seq), np.int64),
    }


def minilm_on(name: str, feed: Arrays, precision: str = "f32", **more: Any) -> Workload:
    """The real encoder on a feed."""
    from rlx import zoo

    folder = zoo.fetch("minilm").parent

    def onnx() -> Any:
        from safetensors.numpy import load_file

        from rlx.zoo.minilm_onnx import build_onnx

        config = json.loads((folder / "config.json").read_text())
        return build_onnx(config, load_file(folder / "model.safetensors"))

    return Workload(name, feed, more.pop("peers", ALL), onnx, options={"precision": precision}, **more)


def _minilm_flops(batch: int, seq: int) -> float:
    return float(batch * seq * (6 * (4 * 384 * 384 + 2 * 384 * 1536) * 2 + 6 * 4 * seq * 384))


def minilm(batch: int, seq: int) -> Workload:
    """The real encoder with its trained weights."""
    flops = _minilm_flops(batch, seq)
    return minilm_on(f"MiniLM b{batch} s{seq}", _minilm_feed(batch, seq), flops=flops, tolerance=2e-4)


def minilm_by_run(batch: int, seq: int) -> Workload:
    """The same through `run`, as in the README."""
    w = minilm(batch, seq)
    return replace(w, name=f"{w.name} by run", by_run=True, peers=("onnxruntime", "openvino"))


def mlp_by_run(batch: int = 1, inputs: int = 64, hidden: int = 256, outputs: int = 10) -> Workload:
    """Two layers, which take a few microseconds: what is measured is the call."""
    net = Layers("mlp")
    x = net.relu(net.linear(net.noise("x", batch, inputs), hidden))
    made = net.made(y=net.linear(x, outputs))
    return Workload(
        f"MLP b{batch} {inputs}-{hidden}-{outputs} by run",
        made.feed,
        ("onnxruntime", "openvino"),
        lambda: made.model,
        by_run=True,
    )


def minilm_bf16(batch: int, seq: int) -> Workload:
    """RLX in bf16 against OpenVINO in bf16."""
    return minilm_on(
        f"MiniLM bf16 b{batch} s{seq}",
        _minilm_feed(batch, seq),
        "bf16",
        peers=("rlx-f32", "openvino-bf16"),
        flops=_minilm_flops(batch, seq),
        tolerance=5e-2,
        dtype="bf16",
    )


def minilm_dynamic() -> Workload:
    """Sentences of 16 lengths from 1 to 512, one after the other: one program, no padding."""
    lengths = [int(n) for n in rng(7).permutation(np.unique(np.linspace(1, 512, 16).astype(int)))]
    return minilm_on(
        "MiniLM b1, 16 lengths 1..512",
        _minilm_feed(1, lengths[0]),
        sweep=[_minilm_feed(1, n) for n in lengths],
        flops=sum(_minilm_flops(1, n) for n in lengths),
        tolerance=2e-4,
    )


def resnet50(batch: int = 1) -> Workload:
    """ResNet-50 v1.5 at 224 x 224 with random weights."""
    peers = ("onnxruntime", "openvino", "torch")
    return _resnet50_on(f"ResNet-50 b{batch}", batch, peers, tolerance=1e-3)


def resnet50_bf16(batch: int = 1) -> Workload:
    """The same in bf16, against OpenVINO in bf16."""
    options = {"precision": "bf16"}
    peers = ("rlx-f32", "openvino-bf16")
    return _resnet50_on(
        f"ResNet-50 bf16 b{batch}", batch, peers, tolerance=5e-2, options=options, dtype="bf16"
    )


def _resnet50_on(name: str, batch: int, peers: tuple[str, ...], **more: Any) -> Workload:
    feed = {"x": normal(rng(1), batch, 3, 224, 224)}
    return Workload(name, feed, peers, lambda: resnet50_model(batch), flops=8.18e9 * batch, **more)


def gpt2_prefill(seq: int = 128) -> Workload:
    """GPT-2 small (124M, random weights): a prompt to the logits of the next token, keys and values kept."""
    feed = {"ids": rng().integers(0, 50257, (1, seq)), "position": np.arange(seq)[None]}
    return Workload(
        f"GPT-2 prefill {seq}",
        feed,
        ("onnxruntime", "openvino", "torch"),
        lambda: gpt2_model(seq, past=0),
        flops=2.0 * (85e6 * seq + 38.6e6),
        tolerance=1e-3,
    )


def gpt2_decode(past: int = 128) -> Workload:
    """GPT-2 small: one token after `past` cached ones."""
    generator = rng()
    feed = {"ids": generator.integers(0, 50257, (1, 1)), "position": np.array([[past]])}
    for i in range(12):
        feed |= {f"past_{kind}_{i}": normal(generator, 1, 12, past, 64) for kind in "kv"}
    return Workload(
        f"GPT-2 decode after {past}",
        feed,
        ("onnxruntime", "openvino", "torch"),
        lambda: gpt2_model(1, past),
        writes=False,
        bytes=4.0 * (85e6 + 38.6e6) + 24 * 4 * 12 * 64 * past * 2,
        tolerance=1e-3,
    )


def lstm(steps: int, batch: int, inputs: int, hidden: int) -> Workload:
    """One LSTM layer over a sequence."""
    feed = {"x": normal(rng(), steps, batch, inputs)}
    weights = lstm_model(steps, batch, inputs, hidden)

    def torch_ways(tensors: dict[str, Any]) -> list[Run]:
        import torch

        layer = torch.nn.LSTM(inputs, hidden)
        order = np.r_[0:hidden, 2 * hidden : 4 * hidden, hidden : 2 * hidden]  # ONNX: i o f c; torch: i f c o
        given = {"weight_ih_l0": weights.w, "weight_hh_l0": weights.r, "bias_ih_l0": weights.b}
        given["bias_hh_l0"] = np.zeros_like(weights.b)
        layer.load_state_dict({name: torch.from_numpy(value[order]) for name, value in given.items()})
        return [lambda: [layer(tensors["x"])[0][:, None]]]

    return Workload(
        f"LSTM {steps}x{batch}x{inputs}x{hidden}",
        feed,
        ("onnxruntime", "openvino", "torch"),
        weights.model,
        torch=torch_ways,
        flops=8.0 * steps * batch * hidden * (inputs + hidden),
    )


def whisper(twin: int = 0) -> Workload:
    """Whisper's log-mel of 30 s; with twin=1 the peer runs its twin with a convolution for the STFT."""
    import onnx

    from rlx import zoo

    own, other = zoo.fetch("whisper80"), zoo.fetch("whisper80-conv" if twin else "whisper80")
    samples = normal(rng(), 1, 480000, scale=0.1)
    feed = {"waveforms": samples, "waveforms_lens": np.array([480000])}

    def graph() -> Any:
        from rlx.frontend.onnx import from_onnx

        return from_onnx(str(own))

    return Workload(
        "Whisper log-mel 30 s" + (" (peer: conv twin)" if twin else ""),
        feed,
        ("onnxruntime", "openvino"),
        lambda: onnx.load(str(other)),
        graph=graph,
        tolerance=2e-2,
        in_mean=False,
    )
