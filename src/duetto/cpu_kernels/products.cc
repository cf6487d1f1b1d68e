// Products of rows with packed weights: tiles of rows by panels of outputs, whose sums stay in registers.
#include "products.h"

#include "simd.h"

namespace ISA {
namespace {

constexpr int VECTORS = COLS / LANES;            // of a panel
constexpr int TALL = LANES == 16 ? 12 : 3;       // rows of a tile of one panel: registers hold their sums
constexpr int SHORT = LANES == 16 ? 6 : 1;       // rows of a tile of two panels, which few rows take
constexpr int MOST_PANELS = LANES == 16 ? 2 : 1;
constexpr int64_t BLOCK = 256;                   // inputs of a block: its x and w stay in the L1 cache
constexpr int64_t ROWS = 240, L2 = 1 << 19;      // rows of a chunk at most, and bytes of its x

// Weights of bfloat16 in pairs of inputs, and the sums' next terms.
struct Bf16 {
  using Number = uint16_t;
  static constexpr int PAIR = 2;
#if defined(__AVX512BF16__)
  using Row = Bits;
  using X = __m512bh;
  static Row row(const Number* w) { return load_bits(w); }
  static X pair(uint32_t x) { return (X)_mm512_set1_epi32(x); }
  static Floats add(X x, Row w, Floats sum) { return _mm512_dpbf16_ps(sum, x, (__m512bh)w); }
#else
  struct Row {
    Floats low, high;
  };
  using X = Row;
  static Row row(const Number* w) {
    Bits both = load_bits(w);
    return {low_halves(both), high_halves(both)};
  }
  static float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  static X pair(uint32_t x) { return {all(as_float(x << 16)), all(as_float(x & 0xffff0000))}; }
  static Floats add(X x, Row w, Floats sum) { return fma(x.high, w.high, fma(x.low, w.low, sum)); }
#endif
  static X inputs(const Number* x) {
    uint32_t both;
    __builtin_memcpy(&both, x, 4);
    return pair(both);
  }
  static X last(const Number* x) { return pair(*x); }  // of an odd number: what follows it is another row's
};

struct F32 {
  using Number = float;
  using Row = Floats;
  using X = Floats;
  static constexpr int PAIR = 1;
  static Row row(const Number* w) { return load(w); }
  static X inputs(const Number* x) { return all(*x); }
  static X last(const Number* x) { return all(*x); }
  static Floats add(X x, Row w, Floats sum) { return fma(x, w, sum); }
};

void put(const Product& p, int64_t row, int64_t column, Floats v) {
  int64_t at = row * p.N + column, left = p.N - column;
  if (left >= LANES) {
    if (p.y_is_bf16) store_bf16((uint16_t*)p.y + at, v);
    else store((float*)p.y + at, v);
    return;
  }
  alignas(64) float wide[LANES];
  alignas(64) uint16_t narrow[LANES];
  store(wide, v);
  store_bf16(narrow, v);
  for (int64_t i = 0; i < left; i++) {
    if (p.y_is_bf16) ((uint16_t*)p.y)[at + i] = narrow[i];
    else ((float*)p.y)[at + i] = wide[i];
  }
}

// Where a tile lies: its first row and panel, its inputs, and the sums that earlier blocks of inputs have left.
struct Place {
  int64_t row, panel, from, to;
  float* sums;  // [rows][COLS], for tiles of one panel
};

template <class T, int R, int PANELS>
void tile(const Product& p, const Place& at) {
  constexpr int C = VECTORS * PANELS;
  const auto* x = (const typename T::Number*)p.x + at.row * p.K;
  const int64_t inputs = (p.K + T::PAIR - 1) / T::PAIR * T::PAIR, panel = inputs * COLS;
  const auto* w = (const typename T::Number*)p.w + at.panel * panel;
  Floats sums[R][C];
  UNROLL(r, R) UNROLL(c, C) sums[r][c] = at.from ? load(at.sums + r * COLS + c * LANES) : zeros();
  auto step = [&](int64_t k, auto inputs_of) __attribute__((always_inline)) {
    typename T::Row rows[C];
    UNROLL(c, C) rows[c] = T::row(w + (c / VECTORS) * panel + k * COLS + (c % VECTORS) * LANES * T::PAIR);
    UNROLL(r, R) {
      auto inputs = inputs_of(x + r * p.K + k);
      UNROLL(c, C) sums[r][c] = T::add(inputs, rows[c], sums[r][c]);
    }
  };
  int64_t k = at.from;
  for (; k + T::PAIR <= at.to; k += T::PAIR) step(k, T::inputs);
  if (k < at.to) step(k, T::last);
  if (at.to < p.K) {
    UNROLL(r, R) UNROLL(c, C) store(at.sums + r * COLS + c * LANES, sums[r][c]);
    return;
  }
  UNROLL(r, R) UNROLL(c, C) if ((at.panel * VECTORS + c) * LANES < p.N) put(p, at.row + r, (at.panel * VECTORS + c) * LANES, sums[r][c]);
}

template <class T, int PANELS, int R>
void tile_of(int64_t rows, const Product& p, const Place& at) {
  if (rows == R) return tile<T, R, PANELS>(p, at);
  if constexpr (R > 1) tile_of<T, PANELS, R - 1>(rows, p, at);
}

// Rows [first,last) of a panel: blocks of inputs, whose part of the panel all tiles read.
template <class T>
void many_rows(const Product& p, int64_t panel, int64_t first, int64_t last) {
  alignas(64) float sums[ROWS * COLS];
  int64_t rows = last - first, tiles = (rows + TALL - 1) / TALL, from = 0;
  do {
    int64_t to = from + BLOCK + BLOCK / 2 < p.K ? from + BLOCK : p.K;
    for (int64_t i = 0; i < tiles; i++) {
      int64_t row = rows * i / tiles, end = rows * (i + 1) / tiles;  // tiles of like height
      tile_of<T, 1, TALL>(end - row, p, {first + row, panel, from, to, sums + row * COLS});
    }
    from = to;
  } while (from < p.K);
}

template <class T>
void panels(const Product& p, int64_t first, int64_t last) {
  if (p.M <= SHORT) {
    for (int64_t i = first; i < last; i += MOST_PANELS) {
      if (i + MOST_PANELS <= last) tile_of<T, MOST_PANELS, SHORT>(p.M, p, {0, i, 0, p.K, nullptr});
      else tile_of<T, 1, SHORT>(p.M, p, {0, i, 0, p.K, nullptr});
    }
    return;
  }
  int64_t fit = L2 / ((p.K + 1) * int64_t(sizeof(typename T::Number))) / TALL * TALL;
  int64_t most = fit < 4 * TALL ? 4 * TALL : fit < ROWS ? fit : ROWS, chunks = (p.M + most - 1) / most;
  for (int64_t i = 0; i < chunks; i++)
    for (int64_t panel = first; panel < last; panel++) many_rows<T>(p, panel, p.M * i / chunks, p.M * (i + 1) / chunks);
}

}  // namespace

const Products products = {panels<Bf16>, panels<F32>};

}  // namespace ISA
