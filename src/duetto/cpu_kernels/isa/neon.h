// Vectors of NEON, and of its instructions on bfloat16.
#pragma once
#include <arm_neon.h>

#include "isa.h"

namespace ISA {
namespace {

constexpr int LANES = 4, REGISTERS = 32;
constexpr bool ADDS_FROM_MEMORY = false;  // no operand of a multiply-add may lie there
using Floats = float32x4_t;
using Bits = uint32x4_t;
using Mask = uint32x4_t;
inline Floats zeros() { return vdupq_n_f32(0); }
inline Floats load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Floats v) { vst1q_f32(p, v); }
inline Floats all(float x) { return vdupq_n_f32(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
inline Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Bits as_bits(Floats v) { return vreinterpretq_u32_f32(v); }
inline Floats as_floats(Bits v) { return vreinterpretq_f32_u32(v); }
inline Bits load_bits(const void* p) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p)); }
inline void store_bits(void* p, Bits v) { vst1q_u8((uint8_t*)p, vreinterpretq_u8_u32(v)); }
inline Floats low_halves(Bits w) { return as_floats(vshlq_n_u32(w, 16)); }
inline Floats high_halves(Bits w) { return as_floats(vandq_u32(w, vdupq_n_u32(0xffff0000))); }
inline Bits joined(Floats low, Floats high) { return vsriq_n_u32(as_bits(high), as_bits(low), 16); }  // the high halves of both
inline Bits load_halves(const void* p) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t*)p))); }
inline Bits load_bytes(const void* p) {
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, 4);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)))));
}
inline Floats widened(const uint16_t* p) { return as_floats(vshll_n_u16(vld1_u16(p), 16)); }
template <int I>
inline Floats signed_byte(Bits v) {
  return vcvtq_f32_s32(vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(v, 24 - 8 * I)), 24));
}
template <int I>
inline Floats nibble(Bits v) {  // around 8
  int32x4_t code = vreinterpretq_s32_u32(vandq_u32(I ? vshrq_n_u32(v, I ? 4 * I : 1) : v, vdupq_n_u32(15)));
  return vcvtq_f32_s32(vsubq_s32(code, vdupq_n_s32(8)));
}
inline Bits nearest_of_numbers(Floats v) {  // bfloat16 in the high halves, to nearest even
  Bits i = as_bits(v), up = vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(vshrq_n_u32(i, 16), vdupq_n_u32(1)));
  return vaddq_u32(i, up);
}
inline Bits nearest_bf16(Floats v) {  // the same; a NaN stays one
  return vbslq_u32(vceqq_f32(v, v), nearest_of_numbers(v), vorrq_u32(as_bits(v), vdupq_n_u32(0x400000)));
}
inline void store_bf16(uint16_t* p, Floats v) { vst1_u16(p, vshrn_n_u32(nearest_bf16(v), 16)); }
inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
inline Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
inline Floats quotient(Floats a, Floats b) { return vdivq_f32(a, b); }
inline Mask below(Floats a, Floats b) { return vcltq_f32(a, b); }
inline Floats where(Mask m, Floats a, Floats b) { return vbslq_f32(m, a, b); }
inline Floats larger(Floats a, Floats b) { return where(below(b, a), a, b); }  // b where one is NaN
inline Floats nearest(Floats x) { return vrndnq_f32(x); }
inline Floats times_power(Floats y, Floats n) {
  Bits biased = vaddq_u32(vreinterpretq_u32_s32(vcvtnq_s32_f32(n)), vdupq_n_u32(127));
  return mul(y, as_floats(vshlq_n_u32(biased, 23)));
}
inline Floats magnitude(Floats x) { return vabsq_f32(x); }
inline Floats with_sign(Floats x, Floats of) { return as_floats(vorrq_u32(as_bits(x), vandq_u32(as_bits(of), as_bits(all(-0.0f))))); }
inline Mask lanes(int first, int end) {  // those with numbers in [first,end)
  const int32_t numbers[] = {0, 1, 2, 3};
  int32x4_t at = vld1q_s32(numbers);
  return vandq_u32(vcgeq_s32(at, vdupq_n_s32(first)), vcltq_s32(at, vdupq_n_s32(end)));
}
inline float sum_of(Floats v) { return vaddvq_f32(v); }
inline float highest(Floats v) { return vmaxnmvq_f32(v); }
inline float first_of(Floats v) { return vgetq_lane_f32(v, 0); }
inline Floats spread(const uint32_t* p) { return as_floats(vld1q_dup_u32(p)); }
inline void transpose(Floats* x) {
  Floats a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]), c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
  auto wide = [](Floats v) { return vreinterpretq_f64_f32(v); };
  x[0] = vreinterpretq_f32_f64(vtrn1q_f64(wide(a), wide(c)));
  x[1] = vreinterpretq_f32_f64(vtrn1q_f64(wide(b), wide(d)));
  x[2] = vreinterpretq_f32_f64(vtrn2q_f64(wide(a), wide(c)));
  x[3] = vreinterpretq_f32_f64(vtrn2q_f64(wide(b), wide(d)));
}
// Adds to each lane the four products of its signed bytes. x has no -128, so two products have room in 16 bits.
constexpr int BYTE_OFFSET = 0;
inline Bits add_bytes(Bits x, Bits w, Bits sum) {
  int8x16_t a = vreinterpretq_s8_u32(x), b = vreinterpretq_s8_u32(w);
  int32x4_t to = vreinterpretq_s32_u32(sum);
#if defined(__ARM_FEATURE_DOTPROD)
  return vreinterpretq_u32_s32(vdotq_s32(to, a, b));
#else
  int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b));
  return vreinterpretq_u32_s32(vpadalq_s16(to, pairs));
#endif
}
// The same of w's numbers 0..15.
constexpr int HALVES_FIT = 0;
inline Bits add_nibbles(Bits x, Bits w, Bits sum) { return add_bytes(x, w, sum); }
inline Bits whole_sums(Bits v) { return v; }
template <int I>
inline Bits nibbles(Bits v) {
  uint8x16_t bytes = vreinterpretq_u8_u32(v);
  return vreinterpretq_u32_u8(I ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15)));
}
inline Floats floats_of(Bits v) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v)); }
inline Bits larger_bits(Bits a, Bits b) { return vmaxq_u32(a, b); }
inline void store_codes(int8_t* p, Floats v) {  // nearest whole numbers, to even
  int16x4_t halves = vqmovn_s32(vcvtnq_s32_f32(v));
  int8x8_t codes = vqmovn_s16(vcombine_s16(halves, halves));
  __builtin_memcpy(p, &codes, LANES);
}
inline float root_of(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

// Pairs of bfloat16, whose products are added up in one instruction.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS 1
inline Floats add_products(Bits a, Bits b, Floats sum) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
inline Bits all_pairs(uint32_t pair) { return vdupq_n_u32(pair); }
inline Bits in_order(Floats first, Floats second) {
  return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
inline Bits paired(Floats even, Floats odd) {
  uint16x8_t both = vreinterpretq_u16_u32(in_order(even, odd));
  return vreinterpretq_u32_u16(vzip1q_u16(both, vextq_u16(both, both, 4)));
}
inline Bits paired(const uint16_t* even, const uint16_t* odd) {
  return vorrq_u32(vmovl_u16(vld1_u16(even)), vshll_n_u16(vld1_u16(odd), 16));
}
inline Bits bytes_in_order(const char* p) {  // numbers of 8 bits with a sign, whose floats have zeros in the low halves
  int16x8_t wide = vmovl_s8(vld1_s8((const int8_t*)p));
  Floats first = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), second = vcvtq_f32_s32(vmovl_high_s16(wide));
  return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second)));
}
inline Bits first_words(const char* p, int64_t) { return load_bits(p); }  // heads have whole vectors of them
#endif

}  // namespace
}  // namespace ISA
