"""Kernels written as LLVM code and compiled for the processor they run on; the compiler comes in llvmlite's wheel."""
