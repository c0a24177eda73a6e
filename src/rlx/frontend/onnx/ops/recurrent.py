"""Recurrent layers."""

from __future__ import annotations

from rlx import ops
from rlx.frontend.onnx.call import Call
from rlx.frontend.onnx.registry import onnx_op
from rlx.frontend.onnx.value import Outputs
from rlx.ir.attr import AttrValue


def recurrent_options(n: Call) -> dict[str, AttrValue]:
    """What RNN, GRU and LSTM have in common."""
    n.attr("hidden_size", None)  # the weights say it
    names = n.attr("activations", None)
    return {
        "lens": n.get(4),
        "initial_h": n.get(5),
        "direction": n.choice("direction", "forward", ("forward", "reverse", "bidirectional")),
        "activations": names,
        "alpha": n.attr("activation_alpha", ()),
        "beta": n.attr("activation_beta", ()),
        "clip": n.attr("clip", None),
        "batch_first": n.flag("layout"),
    }


@onnx_op("RNN", ignored=("output_sequence",))
def rnn(n: Call) -> Outputs:
    return tuple(ops.rnn(n[0], n[1], n[2], n.get(3), **recurrent_options(n)))


@onnx_op("GRU", ignored=("output_sequence",))
def gru(n: Call) -> Outputs:
    linear = n.flag("linear_before_reset")
    return tuple(ops.gru(n[0], n[1], n[2], n.get(3), linear_before_reset=linear, **recurrent_options(n)))


@onnx_op("LSTM", ignored=("output_sequence",))
def lstm(n: Call) -> Outputs:
    return tuple(ops.lstm(n[0], n[1], n[2], n.get(3), **lstm_options(n)))


def lstm_options(n: Call) -> dict[str, AttrValue]:
    """What an LSTM has besides its weights."""
    more = {"initial_c": n.get(6), "peephole": n.get(7), "input_forget": n.flag("input_forget")}
    return recurrent_options(n) | more
