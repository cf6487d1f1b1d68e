// Vectors of floats of the instruction set that a source is compiled for, and what all have alike. Nothing of the
// standard library is used where this is included: the linker would take one set's inline functions for all.
#pragma once
#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "neon.h"
#endif

namespace ISA {
namespace {

#if !defined(HAS_PAIRS)  // what is then named, but not called
#define HAS_PAIRS 0
inline Floats add_products(Bits, Bits, Floats sum) { return sum; }
inline Bits in_order(Floats, Floats) { return as_bits(zeros()); }
inline Bits paired(const uint16_t*, const uint16_t*) { return as_bits(zeros()); }
inline Bits first_words(const char*, int64_t) { return as_bits(zeros()); }
#endif

#if !defined(HAS_BF12)
#define HAS_BF12 0
#endif

inline void fetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into the first cache
inline void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }   // into the second

template <class T>
inline Floats read(const T* p, int64_t n) {  // zeros behind the first n
  T some[LANES] = {};
  if (n < LANES) {
    __builtin_memcpy(some, p, n * sizeof(T));
    p = some;
  }
  if constexpr (sizeof(T) == 2) return widened(p);
  else return load(p);
}

template <class T>
inline void write(T* p, int64_t n, Floats v) {
  T some[LANES], *to = n < LANES ? some : p;
  if constexpr (sizeof(T) == 2) store_bf16(to, v);
  else store(to, v);
  if (n < LANES) __builtin_memcpy(p, some, n * sizeof(T));
}

}  // namespace
}  // namespace ISA
