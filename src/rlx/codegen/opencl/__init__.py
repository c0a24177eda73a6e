"""The OpenCL backend prints kernels as OpenCL C. It needs no OpenCL itself; `rlx.runtime` runs the text."""
