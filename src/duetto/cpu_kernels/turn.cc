// Rotary embedding of rows of heads, rounded once, where attention and the cache need them.
#include "turn.h"

#include "softmax.h"

namespace ISA {
namespace {

template <class T>
void turn_head(const Turn& a, int64_t r, const T* x, T* y) {
  const float *cos = a.cos + r * a.pairs, *sin = a.sin + r * a.pairs;
  for (int64_t i = 0; i < a.pairs; i += LANES) {
    int64_t n = a.pairs - i;
    Floats c = read(cos + i, n), s = read(sin + i, n), left = read(x + i, n), right = read(x + a.pairs + i, n);
    write(y + i, n, sub(mul(left, c), mul(right, s)));
    write(y + a.pairs + i, n, add(mul(right, c), mul(left, s)));
  }
  __builtin_memcpy(y + 2 * a.pairs, x + 2 * a.pairs, (a.H - 2 * a.pairs) * sizeof(T));
}

template <class T>
void rows_of(const Turn& a, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    for (int64_t h = r * a.N; h < (r + 1) * a.N; h++) turn_head(a, r, (const T*)a.q + h * a.H, (T*)a.out + h * a.H);
    int64_t page = a.page[r];
    if (page < 0 || page >= a.P) continue;
    for (int64_t h = 0; h < a.K; h++) {
      int64_t from = (r * a.K + h) * a.H, to = ((h * a.P + page) * a.W + a.offset[r]) * a.H;
      turn_head(a, r, (const T*)a.k + from, (T*)a.keys + to);
      __builtin_memcpy((T*)a.values + to, (const T*)a.v + from, a.H * sizeof(T));
    }
  }
}

}  // namespace

extern const Turns turns;
const Turns turns = {rows_of<uint16_t>, rows_of<float>};

}  // namespace ISA
