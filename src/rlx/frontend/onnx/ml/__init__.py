"""Classical models (ai.onnx.ml)."""
