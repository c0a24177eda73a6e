"""What kernels compute: scalar expressions, forms of ops, and loop nests composed of them."""
