"""Ways into RLX: Python functions (trace) and ONNX files (onnx)."""
