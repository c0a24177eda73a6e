"""From kernels to code: native CPU code through LLVM, OpenCL C."""
