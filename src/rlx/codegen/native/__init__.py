"""The notation of native code: LLVM IR, vectorised math, compiling and loading."""
