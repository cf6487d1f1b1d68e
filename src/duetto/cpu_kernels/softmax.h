// What attention needs of vectors beside products: exponentials, masks, and transposed squares.
#pragma once
#include "isa/simd.h"

namespace ISA {
namespace {

#if defined(__AVX512F__)
using Mask = __mmask16;
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
#else
using Mask = __m256;
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
#endif

// e^x for x <= 0: the polynomial of Cephes' expf. 0 where float has no normal number for it; NaN of NaN.
inline Floats exp_of(Floats x) {
  Floats at_least = larger(all(-87.3f), x), n = nearest(mul(at_least, all(1.44269504f)));
  Floats r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), at_least));
  Floats y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, mul(r, r), add(r, all(1.0f)));
  return where(below(x, all(-87.3f)), zeros(), times_power(y, n));
}

inline Floats tanh_of(Floats x) {
  Floats e = exp_of(mul(magnitude(x), all(-2.0f)));
  return with_sign(quotient(sub(all(1.0f), e), add(all(1.0f), e)), x);
}

}  // namespace
}  // namespace ISA
