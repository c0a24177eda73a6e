"""Ops of ONNX Runtime's domain (com.microsoft)."""
