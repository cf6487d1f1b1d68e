// Vectors of AVX512, and of AVX512_BF16.
#pragma once
#include <immintrin.h>

#include "isa.h"

namespace ISA {
namespace {

constexpr int LANES = 16, REGISTERS = 32;
constexpr bool ADDS_FROM_MEMORY = true;  // an operand of a multiply-add may lie there
using Floats = __m512;
using Bits = __m512i;
using Mask = __mmask16;
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
inline Bits nearest_of_numbers(Floats v) {  // bfloat16 in the high halves, to nearest even
  Bits i = _mm512_castps_si512(v);
  Bits up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(i, 16), _mm512_set1_epi32(1)));
  return _mm512_add_epi32(i, up);
}
inline Bits nearest_bf16(Floats v) {  // the same; a NaN stays one
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(nearest_of_numbers(v), nan, _mm512_castps_si512(v), _mm512_set1_epi32(0x400000));
}
inline void store_bf16(uint16_t* p, Floats v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_bf16(v), 16)));
}
inline Bits as_bits(Floats v) { return _mm512_castps_si512(v); }
inline Floats as_floats(Bits v) { return _mm512_castsi512_ps(v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats quotient(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b where one is NaN
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
inline Floats times_power(Floats y, Floats n) { return _mm512_scalef_ps(y, n); }
inline Mask below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Floats where(Mask m, Floats a, Floats b) { return _mm512_mask_blend_ps(m, b, a); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats with_sign(Floats x, Floats of) {
  Bits sign = _mm512_and_si512(_mm512_castps_si512(of), _mm512_set1_epi32(0x80000000));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}
inline Mask lanes(int first, int end) {  // those with numbers in [first,end)
  Bits at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(first)) & _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(end));
}
inline float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
inline float highest(Floats v) { return _mm512_reduce_max_ps(v); }
inline float first_of(Floats v) { return _mm512_cvtss_f32(v); }
inline Floats spread(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(*p)); }
inline void transpose(Floats* x) {
  Floats a[16], b[16];
  UNROLL(i, 8) {
    a[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
  }
  UNROLL(i, 4) UNROLL(h, 2) {
    __m512d lo = _mm512_castps_pd(a[4 * i + h]), hi = _mm512_castps_pd(a[4 * i + 2 + h]);
    b[4 * i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
    b[4 * i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
  }
  UNROLL(c, 4) {  // b[4*i+c] has the columns c, c+4, c+8, c+12 of the rows 4*i to 4*i+3
    Floats even = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    Floats even2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88), odd2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    x[c] = _mm512_shuffle_f32x4(even, even2, 0x88);
    x[8 + c] = _mm512_shuffle_f32x4(even, even2, 0xdd);
    x[4 + c] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
    x[12 + c] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
}
// Adds to each lane the four products of its signed bytes. With VNNI, w's bytes are those plus BYTE_OFFSET; without, x
// has no -128, so two products have room in 16 bits.
#if defined(__AVX512VNNI__)
constexpr int BYTE_OFFSET = 128;
inline Bits add_bytes(Bits x, Bits w, Bits sum) {
  return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
}
// The same of w's numbers 0..15.
constexpr int HALVES_FIT = 0;
inline Bits add_nibbles(Bits x, Bits w, Bits sum) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Bits whole_sums(Bits v) { return v; }
#else
constexpr int BYTE_OFFSET = 0;
inline Bits add_bytes(Bits x, Bits w, Bits sum) {
  Bits with_sign = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  Bits pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), with_sign);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// The same of w's numbers 0..15, to two sums of 16 bits in each lane. Those less 8 have room for HALVES_FIT inputs.
constexpr int HALVES_FIT = 64;
inline Bits add_nibbles(Bits x, Bits w, Bits sums) { return _mm512_add_epi16(sums, _mm512_maddubs_epi16(w, x)); }
inline Bits whole_sums(Bits v) { return _mm512_madd_epi16(v, _mm512_set1_epi16(1)); }
#endif
template <int I>
inline Bits nibbles(Bits v) { return _mm512_and_si512(I ? _mm512_srli_epi16(v, 4) : v, _mm512_set1_epi8(15)); }
inline Floats floats_of(Bits v) { return _mm512_cvtepi32_ps(v); }
inline Bits larger_bits(Bits a, Bits b) { return _mm512_max_epu32(a, b); }
inline void store_codes(int8_t* p, Floats v) {  // nearest whole numbers, to even
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline float root_of(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
// Pairs of bfloat16, whose products are added up in one instruction.
#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
inline Floats add_products(Bits a, Bits b, Floats sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
inline Bits all_pairs(uint32_t pair) { return _mm512_set1_epi32(pair); }
inline Bits in_order(Floats first, Floats second) { return (Bits)_mm512_cvtne2ps_pbh(second, first); }
inline Bits paired(Floats even, Floats odd) {
  Bits low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  Bits places = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
  return _mm512_permutexvar_epi16(places, in_order(even, odd));
}
inline Bits paired(const uint16_t* even, const uint16_t* odd) {
  Bits low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
  Bits high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
inline Bits bytes_in_order(const char* p) {  // numbers of 8 bits with a sign
  auto floats = [](const char* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); };
  return in_order(floats(p), floats(p + 16));
}
#if !defined(__AMX_BF16__)
#define HAS_BF12 1
inline Bits exponents_from(int before) {  // what codes of 4 bits stand for, twice, where bfloat16 has its exponent
  alignas(64) uint16_t of[32];
  for (int i = 0; i < 32; i++) of[i] = i % 16 ? (before + i % 16) << 7 : 0;
  return _mm512_load_si512(of);
}
inline Bits with_exponents(const char* signs_and_mantissas, const char* codes, Bits exponents) {
  Bits pairs = load_bytes(codes), others = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)signs_and_mantissas));
  Bits found = _mm512_permutexvar_epi16(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), exponents);
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x807f), others, found, 0xca);  // by the mask's bits
}
inline Bits with_half(Bits v, int64_t place, uint16_t x) { return _mm512_mask_set1_epi16(v, __mmask32(1) << place, x); }
#endif
inline Bits first_words(const char* p, int64_t n) {  // zeros behind the first n
  return _mm512_maskz_loadu_epi32(n >= 16 ? 0xffff : (1 << n) - 1, p);
}
#endif

}  // namespace
}  // namespace ISA
