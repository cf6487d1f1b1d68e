// Vectors of AVX2.
#pragma once
#include <immintrin.h>

#include "isa.h"

namespace ISA {
namespace {

constexpr int LANES = 8, REGISTERS = 16;
constexpr bool ADDS_FROM_MEMORY = true;  // an operand of a multiply-add may lie there
using Floats = __m256;
using Bits = __m256i;
using Mask = __m256;
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
inline Bits load_halves(const void* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
// A whole number below 2^23 becomes a float as the last bits of one: shifts and conversions have fewer ports than that.
template <int I>
inline Floats signed_byte(Bits v) {  // of each half
  Bits places = _mm256_add_epi32(_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), _mm256_set1_epi32(I | ~255));
  Floats zero = all(8388608.0f + 128);
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_xor_si256(_mm256_shuffle_epi8(v, places), _mm256_castps_si256(zero))), zero);
}
template <int I>
inline Floats nibble(Bits v) {  // around 8
  Floats power = all(I ? 524288 : 8388608);  // whose last bit stands for 1, or for 1/16
  Bits code = _mm256_and_si256(v, _mm256_set1_epi32(15 << 4 * I));
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_or_si256(code, _mm256_castps_si256(power))), all((I ? 524288 : 8388608) + 8));
}
inline Bits nearest_of_numbers(Floats v) {  // bfloat16 in the high halves, to nearest even
  Bits i = _mm256_castps_si256(v);
  Bits up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(i, 16), _mm256_set1_epi32(1)));
  return _mm256_add_epi32(i, up);
}
inline Bits nearest_bf16(Floats v) {  // the same; a NaN stays one
  Bits i = _mm256_castps_si256(v);
  Bits quiet = _mm256_or_si256(i, _mm256_set1_epi32(0x400000));
  Bits nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(nearest_of_numbers(v), quiet, nan);
}
inline void store_bf16(uint16_t* p, Floats v) {
  Bits rounded = _mm256_srli_epi32(nearest_bf16(v), 16);
  __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
  _mm_storeu_si128((__m128i*)p, halves);
}
inline Bits as_bits(Floats v) { return _mm256_castps_si256(v); }
inline Floats as_floats(Bits v) { return _mm256_castsi256_ps(v); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats quotient(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b where one is NaN
inline Floats nearest(Floats x) { return _mm256_round_ps(x, 8); }
inline Floats times_power(Floats y, Floats n) {
  Bits biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return mul(y, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
inline Mask below(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
inline Floats where(Mask m, Floats a, Floats b) { return _mm256_blendv_ps(b, a, m); }
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Floats with_sign(Floats x, Floats of) { return _mm256_or_ps(x, _mm256_and_ps(all(-0.0f), of)); }
inline Mask lanes(int first, int end) {  // those with numbers in [first,end)
  Bits at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  Bits before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), at), here = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), at);
  return _mm256_castsi256_ps(_mm256_andnot_si256(before, here));
}
inline float sum_of(Floats v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float highest(Floats v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float first_of(Floats v) { return _mm256_cvtss_f32(v); }
inline Floats spread(const uint32_t* p) { return _mm256_castsi256_ps(_mm256_set1_epi32(*p)); }
inline void transpose(Floats* x) {
  Floats a[8], b[8];
  UNROLL(i, 4) {
    a[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  UNROLL(i, 2) UNROLL(h, 2) {
    __m256d lo = _mm256_castps_pd(a[4 * i + h]), hi = _mm256_castps_pd(a[4 * i + 2 + h]);
    b[4 * i + 2 * h] = _mm256_castpd_ps(_mm256_unpacklo_pd(lo, hi));
    b[4 * i + 2 * h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(lo, hi));
  }
  UNROLL(c, 4) {
    x[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    x[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}
// Adds to each lane the four products of its signed bytes. x has no -128, so two products have room in 16 bits.
constexpr int BYTE_OFFSET = 0;
inline Bits add_bytes(Bits x, Bits w, Bits sum) {
  Bits pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// The same of w's numbers 0..15, to two sums of 16 bits in each lane. Those less 8 have room for HALVES_FIT inputs.
constexpr int HALVES_FIT = 64;
inline Bits add_nibbles(Bits x, Bits w, Bits sums) { return _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x)); }
inline Bits whole_sums(Bits v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }
template <int I>
inline Bits nibbles(Bits v) { return _mm256_and_si256(I ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15)); }
inline Floats floats_of(Bits v) { return _mm256_cvtepi32_ps(v); }
inline Bits larger_bits(Bits a, Bits b) { return _mm256_max_epu32(a, b); }
inline void store_codes(int8_t* p, Floats v) {  // nearest whole numbers, to even
  Bits codes = _mm256_cvtps_epi32(v);
  __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
inline float root_of(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

}  // namespace
}  // namespace ISA
