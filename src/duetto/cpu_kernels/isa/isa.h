// Instruction sets that kernels are compiled for. build.py compiles each source of kernels once for each of them,
// with ISA defined as its name, which is the namespace of what that source defines. It defines FOR_EACH_ISA for a
// library that has some of them only.
#pragma once
#include <cstdint>

// A function's name in the library: VERSION is that of build.py.
#define WITH_VERSION(name, version) duetto_##name##_##version
#define EXPORTED_AS(name, version) WITH_VERSION(name, version)
#define EXPORTED(name) EXPORTED_AS(name, VERSION)
#ifndef FOR_EACH_ISA
#if defined(__aarch64__)
#define FOR_EACH_ISA(X) X(neon) X(neon_bf16)
#else
#define FOR_EACH_ISA(X) X(avx2) X(avx512) X(avx512_bf16) X(avx512_amx)
#endif
#endif

#define UNROLL(i, n) _Pragma("GCC unroll 32") for (int i = 0; i < (n); i++)  // arrays of vectors become registers
