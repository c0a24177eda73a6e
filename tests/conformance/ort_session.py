"""ONNX Runtime as tests use it: on one thread. Its other threads spin, which slows tests beside it."""

from __future__ import annotations

import os
from typing import Any


def open_session(model: Any) -> Any:
    """A session for a model on the CPU: a ModelProto or the path of a file."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    given = os.fspath(model) if isinstance(model, str | os.PathLike) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
