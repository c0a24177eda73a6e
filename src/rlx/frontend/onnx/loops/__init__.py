"""Control flow and sequences of ONNX."""
