// Instruction sets that kernels are compiled for. build.py compiles each source of kernels once for each of them,
// with ISA defined as its name, which is the namespace of what that source defines.
#pragma once
#include <cstdint>

#define FOR_EACH_ISA(X) X(avx2) X(avx512) X(avx512_bf16)
