"""The few functions that training losses are written in, for each framework."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def rlx_language() -> SimpleNamespace:
    from rlx import ops

    def norm(x: Any) -> Any:
        centred = x - ops.mean(x, axis=-1, keepdims=True)
        return centred * ops.rsqrt(ops.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)

    return SimpleNamespace(
        relu=ops.relu,
        gelu=ops.gelu,
        softmax=lambda x: ops.softmax(x, axis=-1),
        log_softmax=lambda x: ops.log_softmax(x, axis=-1),
        mean=ops.mean,
        norm=norm,
        reshape=ops.reshape,
        transpose=ops.transpose,
    )


def torch_language() -> SimpleNamespace:
    from torch.nn import functional

    return SimpleNamespace(
        relu=functional.relu,
        gelu=functional.gelu,
        softmax=lambda x: x.softmax(-1),
        log_softmax=lambda x: x.log_softmax(-1),
        mean=lambda x: x.mean(),
        norm=lambda x: functional.layer_norm(x, x.shape[-1:]),
        reshape=lambda x, shape: x.reshape(shape),
        transpose=lambda x, axes: x.permute(axes),
    )


def jax_language() -> SimpleNamespace:
    from jax import nn

    return SimpleNamespace(
        relu=nn.relu,
        gelu=lambda x: nn.gelu(x, approximate=False),
        softmax=nn.softmax,
        log_softmax=nn.log_softmax,
        mean=lambda x: x.mean(),
        norm=lambda x: nn.standardize(x, -1, epsilon=1e-5),
        reshape=lambda x, shape: x.reshape(shape),
        transpose=lambda x, axes: x.transpose(axes),
    )
