// Norms of rows, rounded where the reference rounds them (model/layers.py).
#include "norm.h"

#include "softmax.h"

namespace ISA {
namespace {

template <class T>
inline Floats rounded(Floats v) {
  T some[LANES];
  write(some, LANES, v);
  return read(some, LANES);
}

// The mean of a row's numbers, or of the squares of what they are above `mean`.
template <bool SQUARES, class T>
float mean_of(const T* x, int64_t D, float mean) {
  Floats sum = zeros();
  for (int64_t i = 0; i < D; i += LANES) {
    Floats v = read(x + i, D - i);
    if constexpr (SQUARES) {
      v = sub(v, all(mean));
      if (D - i < LANES) v = where(lanes(0, int(D - i)), v, zeros());
      sum = fma(v, v, sum);
    } else {
      sum = add(sum, v);
    }
  }
  return sum_of(sum) / float(D);
}

template <class T>
void rows_of(const Norm& a, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    const T* x = (const T*)a.x + r * a.D;
    const T *gain = (const T*)a.gain, *bias = (const T*)a.bias;
    T* y = (T*)a.y + r * a.D;
    int64_t group = r % a.groups * a.D;
    float mean = a.is_layer ? mean_of<false>(x, a.D, 0) : 0;
    float root = root_of(mean_of<true>(x, a.D, mean) + a.eps);
    for (int64_t i = 0; i < a.D; i += LANES) {
      int64_t n = a.D - i;
      Floats v = mul(sub(read(x + i, n), all(mean)), all(1 / root));
      if (gain && a.offset) v = mul(v, add(all(a.offset), read(gain + group + i, n)));
      else if (gain) v = mul(rounded<T>(v), read(gain + group + i, n));
      if (bias) v = add(rounded<T>(v), read(bias + group + i, n));
      write(y + i, n, v);
    }
  }
}

}  // namespace

extern const Norms norms;
const Norms norms = {rows_of<uint16_t>, rows_of<float>};

}  // namespace ISA
