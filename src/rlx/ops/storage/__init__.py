"""How weights are stored for kernels; the compiler alone writes these ops."""
