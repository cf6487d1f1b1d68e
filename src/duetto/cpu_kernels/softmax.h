// What attention needs of vectors beside products: exponentials.
#pragma once
#include "isa/simd.h"

namespace ISA {
namespace {

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
