"""ONNX's own ops, a family per file."""
