"""Native CPU code: vector LLVM IR written as text, compiled and loaded through llvmlite."""
