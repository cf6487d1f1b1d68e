// Vectors of floats of the instruction set that a source is compiled for. Nothing of the standard library is used
// where this is included: the linker would take one set's inline functions for all.
#pragma once
#include <immintrin.h>

#include "isa.h"

#define UNROLL(i, n) _Pragma("GCC unroll 32") for (int i = 0; i < (n); i++)  // arrays of vectors become registers

namespace ISA {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
using Floats = __m512;
using Bits = __m512i;
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Bits load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline Floats low_halves(Bits w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline Floats high_halves(Bits w) { return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(0xffff0000))); }
inline Floats widened(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_bits(void* p, Bits v) { _mm512_storeu_si512(p, v); }
inline Bits joined(Floats low, Floats high) {  // the high halves of both
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), (Bits)high_halves(_mm512_castps_si512(high)));
}
inline Bits load_bytes(const void* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Bits load_halves(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
template <int I>
inline Floats signed_byte(Bits v) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * I), 24)); }
template <int I>
inline Floats nibble(Bits v) {  // around 8
  Floats numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * I), numbers);
}
inline Bits nearest_bf16(Floats v) {  // in the high halves, to nearest even; a NaN stays one
  Bits i = _mm512_castps_si512(v);
  Bits up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1)));
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(_mm512_add_epi32(i, up), nan, i, _mm512_set1_epi32(0x400000));
}
inline void store_bf16(uint16_t* p, Floats v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_bf16(v), 16)));
}
#else
constexpr int LANES = 8;
using Floats = __m256;
using Bits = __m256i;
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Bits load_bits(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Floats low_halves(Bits w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline Floats high_halves(Bits w) { return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff0000))); }
inline Floats widened(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline void store_bits(void* p, Bits v) { _mm256_storeu_si256((__m256i*)p, v); }
inline Bits joined(Floats low, Floats high) {  // the high halves of both
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(low), 16), (Bits)high_halves(_mm256_castps_si256(high)));
}
inline Bits load_bytes(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Bits load_halves(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
template <int I>
inline Floats signed_byte(Bits v) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * I), 24)); }
template <int I>
inline Floats nibble(Bits v) {  // around 8
  Bits code = _mm256_and_si256(_mm256_srli_epi32(v, 4 * I), _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(code, _mm256_set1_epi32(8)));
}
inline Bits nearest_bf16(Floats v) {  // in the high halves, to nearest even; a NaN stays one
  Bits i = _mm256_castps_si256(v);
  Bits up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1)));
  Bits quiet = _mm256_or_si256(i, _mm256_set1_epi32(0x400000));
  Bits nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_add_epi32(i, up), quiet, nan);
}
inline void store_bf16(uint16_t* p, Floats v) {
  Bits rounded = _mm256_srli_epi32(nearest_bf16(v), 16);
  __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128((__m128i*)p, halves);
}
#endif

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
