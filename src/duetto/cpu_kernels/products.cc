// Products of rows with packed weights: tiles of rows by panels of outputs, whose sums stay in registers.
#include "products.h"

#include "isa/amx.h"
#include "isa/simd.h"

namespace ISA {
namespace {

constexpr int VECTORS = COLS / LANES;            // of a panel
constexpr int SUMS = REGISTERS * 3 / 4;          // registers of a tile's sums
constexpr int SHORT = SUMS / (2 * VECTORS);      // rows of a tile of two panels, which few rows take
constexpr int MOST_PANELS = SHORT > 1 ? 2 : 1;
constexpr int64_t BLOCK_BYTES = 512;             // of an x's row in a block: its x and w stay in the L1 cache
constexpr int64_t L2 = 1 << 19;                  // bytes of a chunk's x
constexpr int64_t AHEAD = 4096;                  // bytes between weights that are read and those that are fetched

struct Pair {  // of inputs
  Floats low, high;
};
inline Floats add_pair(Pair x, Pair w, Floats sum) { return fma(x.high, w.high, fma(x.low, w.low, sum)); }
inline Pair signed_bytes(const char* w) {
  Bits both = load_halves(w);
  return {signed_byte<0>(both), signed_byte<1>(both)};
}

// The scales of a vector of a panel's outputs, in a group of inputs.
inline Floats scales_of(const Product& p, int64_t panel, int64_t vector, int64_t group) {
  int64_t at = (panel * (p.K / p.group) + group) * COLS + vector * LANES;
  return p.scales_are_bf16 ? widened((const uint16_t*)p.scales + at) : load((const float*)p.scales + at);
}

inline float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// Weights that no scale makes numbers. Their sums begin with 0.
struct Unscaled {
  struct Scale {};
  static constexpr bool KEEPS = false, HAS_TOTALS = false;
  static Scale scale(const Product&, int64_t, int64_t, int64_t) { return {}; }
  static Floats start(const Product&, int64_t) { return zeros(); }
  static Floats number(const Product& p, int64_t, Floats sum, Floats scale) { return p.form == INT8 ? mul(sum, scale) : sum; }
};

// What holds the sums of a tile of one panel: its rows at most, and those of a chunk.
struct Vectors {
  static constexpr bool ARE_TILES = false;
  static constexpr int TALL = SUMS / VECTORS, ROWS = 264;  // 256 in tiles of 12
};
#if defined(__AMX_BF16__)
using OfBf16 = Tiles;
#else
using OfBf16 = Vectors;
#endif
constexpr int TALL = Vectors::TALL;

// Weights of x's kind: their rows, of PAIR inputs, and the sums' next terms.
struct Bf16 : Unscaled {
  using Number = uint16_t;
  using Plain = Bf16;
  using Registers = OfBf16;
  static constexpr int PAIR = 2, BITS = 16;
#if HAS_PAIRS
  using Row = Bits;
  using X = Bits;
  static Row row(const char* w, Scale) { return load_bits(w); }
  static Row of_bytes(const char* w) { return bytes_in_order(w); }
  static Row of(Pair w) { return paired(w.low, w.high); }
  static void keep(Number* to, int vector, Row w) { store_bits(to + vector * LANES * 2, w); }
  static X pair(uint32_t x) { return all_pairs(x); }
  static Floats add(X x, Row w, Floats sum) { return add_products(x, w, sum); }
#else
  using Row = Pair;
  using X = Pair;
  static Row row(const char* w, Scale) {
    Bits both = load_bits(w);
    return {low_halves(both), high_halves(both)};
  }
  static Row of_bytes(const char* w) { return signed_bytes(w); }
  static Row of(Pair w) { return {high_halves(nearest_of_numbers(w.low)), high_halves(nearest_of_numbers(w.high))}; }
  static void keep(Number* to, int vector, Row w) { store_bits(to + vector * LANES * 2, joined(w.low, w.high)); }
  static X pair(uint32_t x) { return {all(as_float(x << 16)), all(as_float(x & 0xffff0000))}; }
  static Floats add(X x, Row w, Floats sum) { return add_pair(x, w, sum); }
#endif
  static X inputs(const Number* x) {
    uint32_t both;
    __builtin_memcpy(&both, x, 4);
    return pair(both);
  }
  static X last(const Number* x) { return pair(*x); }  // of an odd number: what follows it is another row's
};

struct F32 : Unscaled {
  using Number = float;
  using Plain = F32;
  using Registers = Vectors;
  using Row = Floats;
  using X = Floats;
  static constexpr int PAIR = 1, BITS = 32;
  static Row row(const char* w, Scale) { return load((const float*)w); }
  static X inputs(const Number* x) { return all(*x); }
  static Floats add(X x, Row w, Floats sum) { return fma(x, w, sum); }
};

// Floats as codes have them: in pairs, whose sums are those of F32.
struct F32Pairs : Unscaled {
  using Number = float;
  using Plain = F32;
  using Registers = Vectors;
  using Row = Pair;
  using X = Pair;
  static constexpr int PAIR = 2;
  static Row of_bytes(const char* w) { return signed_bytes(w); }
  static Row of(Pair w) { return w; }
  static void keep(Number* to, int vector, Row w) {
    store(to + vector * LANES, w.low);
    store(to + COLS + vector * LANES, w.high);
  }
  static X inputs(const Number* x) { return {all(x[0]), all(x[1])}; }
  static X last(const Number* x) { return {all(*x), all(-0.0f)}; }  // whose product changes no sum
  static Floats add(X x, Row w, Floats sum) { return add_pair(x, w, sum); }
};

template <class Kind>
struct Int8 : Kind {
  static constexpr int BITS = 8;
  static typename Kind::Row row(const char* w, typename Kind::Scale) { return Kind::of_bytes(w); }
};

template <class Kind>
struct Int4 : Kind {
  using Scale = Floats;
  static constexpr int BITS = 4;
  static Scale scale(const Product& p, int64_t panel, int64_t vector, int64_t group) {
    Floats scale = scales_of(p, panel, vector, group);
    return where(below(all(-1), magnitude(scale)), scale, all(__builtin_nanf("")));  // one NaN, which stays one when rounded
  }
  static typename Kind::Row row(const char* w, Scale scale) {
    Bits both = load_bytes(w);
    return Kind::of({mul(nibble<0>(both), scale), mul(nibble<1>(both), scale)});
  }
};

// Codes with rows of codes. Sums are whole numbers, whose bits floats hold.
struct Codes : Unscaled {
  using Number = int8_t;
  using Plain = Codes;
  using Registers = Vectors;
  using Row = Bits;
  using X = Bits;
  static constexpr int PAIR = 4, BITS = 8;
  static Row row(const char* w, Scale) { return load_bits(w); }
  static X inputs(const Number* x) {
    uint32_t four;
    __builtin_memcpy(&four, x, 4);
    return as_bits(all(as_float(four)));
  }
  static Floats add(X x, Row w, Floats sum) { return as_floats(add_bytes(x, w, as_bits(sum))); }
  static Floats start(const Product& p, int64_t row) { return all(as_float(p.rows[row].start)); }
  static Floats number(const Product& p, int64_t row, Floats sum, Floats scale) {
    return mul(mul(floats_of(as_bits(sum)), scale), all(p.rows[row].scale));
  }
};

struct Eight {  // codes, of four inputs in each lane, and of the next four
  Bits low, high;
};

// 4-bit codes with rows of codes. A tile's sums are whole numbers of a unit of inputs, in turn; its totals are of groups.
struct Nibbles : Codes {
  using Plain = Nibbles;
  using Row = Eight;
  using X = Eight;
  static constexpr bool HAS_TOTALS = true;
  static constexpr int PAIR = 8, BITS = 4;
  static Row row(const char* w, Scale) {
    Bits both = load_bits(w);
    return {nibbles<0>(both), nibbles<1>(both)};
  }
  static X inputs(const Number* x) { return {Codes::inputs(x), Codes::inputs(x + 4)}; }
  static Floats add(X x, Row w, Floats sum) { return as_floats(add_nibbles(x.high, w.high, add_nibbles(x.low, w.low, as_bits(sum)))); }
  static Floats start(const Product&, int64_t) { return zeros(); }
  static Floats unit_start(const Product& p, int64_t row, int64_t unit) { return all(as_float(p.starts[row * (p.K / p.unit) + unit])); }
  static Floats number(const Product& p, int64_t row, Floats total, Floats) { return mul(total, all(p.rows[row].scale)); }
};

// Weights that a tile unpacks, and those that become numbers of x's kind by that.
template <class T>
constexpr bool IS_UNPACKED = T::BITS < 8 * sizeof(typename T::Number);
template <class T>
constexpr bool IS_WIDENED = IS_UNPACKED<T> && !T::HAS_TOTALS;

// A tile's weights, which the next tiles of its panel find as numbers.
template <class T>
struct Kept : T {
  static constexpr bool KEEPS = IS_WIDENED<T>;
};

template <class T>
constexpr int64_t VECTOR_BYTES = LANES * T::PAIR * T::BITS / 8;

template <class T>
inline int64_t panel_bytes(int64_t K) {
  return (K + T::PAIR - 1) / T::PAIR * T::PAIR * COLS * T::BITS / 8;
}

// The outliers of consecutive panels from an input on, in order; empty for weights of other sizes.
template <int BITS, int PANELS>
struct Outliers {
  Outliers(const Product&, int64_t, int64_t) {}
};

#if HAS_BF12
struct Bf12 : Bf16 {
  using Scale = Bits;
  static constexpr int BITS = 12;
  static Scale scale(const Product& p, int64_t panel, int64_t, int64_t) { return exponents_from(((const Exponents*)p.scales)[panel].before); }
  static Row row(const char* w, Scale exponents) { return with_exponents(w, w + LANES * 2, exponents); }
};

template <int PANELS>
struct Outliers<12, PANELS> {
  const Outlier *next[PANELS], *end[PANELS];
  const char *w, *at[PANELS];  // all weights, and a panel's next vector that has some

  Outliers(const Product& p, int64_t panel, int64_t from) : w((const char*)p.w) {
    const auto* exponents = (const Exponents*)p.scales + panel;
    const auto* all = (const Outlier*)(w + p.panels() * panel_bytes<Bf12>(p.K));
    for (int i = 0; i < PANELS; i++) {
      next[i] = all + (panel + i ? exponents[i - 1].end : 0);
      end[i] = all + exponents[i].end;
      int64_t first = ((panel + i) * ((p.K + 1) / 2) + from / 2) * COLS * 2;
      while (next[i] < end[i] && next[i]->place < first) next[i]++;
      find(i);
    }
  }
  void find(int i) { at[i] = next[i] < end[i] ? w + next[i]->place / (LANES * 2) * (LANES * 3) : nullptr; }
  Bits put(Bits weights, int i) {  // the next vector's weights
    for (const char* vector = at[i]; at[i] == vector; next[i]++, find(i))
      weights = with_half(weights, next[i]->place % (LANES * 2), next[i]->weight);
    return weights;
  }
};
#else
using Bf12 = Bf16;
#endif

// Calls f(from, to, group) for the inputs [from,to) of each group, or unit, of 4-bit codes; for all at once elsewhere.
template <class T, class F>
inline __attribute__((always_inline)) void by_groups(const Product& p, int64_t from, int64_t to, F f) {
  if constexpr (T::BITS != 4) return f(from, to, 0);
  const int64_t size = T::HAS_TOTALS ? p.unit : p.group;
  while (from < to) {
    int64_t group = from / size, end = (group + 1) * size;
    if (end > to) end = to;
    f(from, end, group);
    from = end;
  }
}

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

// Adds the sums of a unit of NIBBLES to those of its group, and the group's to the totals when it ends.
template <int R, int C>
inline __attribute__((always_inline)) void add_unit(const Product& p, int64_t panel, int64_t unit, const Floats (&sums)[R][C], Floats (&groups)[R][C], Floats (&totals)[R][C]) {
  int64_t parts = p.group / p.unit, group = unit;
  bool begins = true, ends = true;
  if (parts > 1) group = unit / parts, begins = unit % parts == 0, ends = unit % parts == parts - 1;
  UNROLL(c, C) {
    Floats scale = scales_of(p, panel + c / VECTORS, c % VECTORS, group);
    UNROLL(r, R) {
      Floats sum = floats_of(whole_sums(as_bits(sums[r][c])));
      if (!begins) sum = add(groups[r][c], sum);
      if (ends) totals[r][c] = add(totals[r][c], mul(sum, scale));
      else groups[r][c] = sum;
    }
  }
}

// Where a tile lies: its first row and panel, its inputs, their weights, and the sums that earlier blocks of inputs
// have left.
struct Place {
  int64_t row, panel, from, to;
  const char* w;
  float* sums;    // [rows][COLS], for tiles of one panel
  void* numbers;  // where it keeps codes as numbers of x's kind, packed as such, or null
};

template <class T, int R, int C>
inline __attribute__((always_inline)) void put_all(const Product& p, const Place& at, const Floats (&sums)[R][C]) {
  UNROLL(c, C) {
    int64_t column = (at.panel * VECTORS + c) * LANES;
    bool is_scaled = p.form == INT8 || p.form == CODES;
    Floats scale = is_scaled ? scales_of(p, at.panel + c / VECTORS, c % VECTORS, 0) : all(1.0f);
    UNROLL(r, R) if (column < p.N) put(p, at.row + r, column, T::number(p, at.row + r, sums[r][c], scale));
  }
}

template <class T, int R, int PANELS>
void tile(const Product& p, const Place& place) {
  constexpr int C = VECTORS * PANELS;
  const Place at = place;  // of which no weight that is kept may be a part, as far as the compiler knows
  const int64_t K = p.K;
  const auto* x = (const typename T::Number*)p.x + at.row * K;
  const int64_t panel = panel_bytes<T>(p.K);
  Floats sums[R][C], groups[R][C], totals[R][C];
  auto& results = [&]() -> Floats (&)[R][C] {
    if constexpr (T::HAS_TOTALS) return totals;
    else return sums;
  }();
  if constexpr (T::HAS_TOTALS)
    UNROLL(r, R) UNROLL(c, C) groups[r][c] = zeros();
  UNROLL(r, R) UNROLL(c, C) results[r][c] = at.from ? load(at.sums + r * COLS + c * LANES) : T::start(p, at.row + r);
  [[maybe_unused]] Outliers<T::BITS, PANELS> outliers(p, at.panel, at.from);
  by_groups<T>(p, at.from, at.to, [&](int64_t k, int64_t end, int64_t group) __attribute__((always_inline)) {
    typename T::Scale scales[C];
    UNROLL(c, C) scales[c] = T::scale(p, at.panel + c / VECTORS, c % VECTORS, group);
    if constexpr (T::HAS_TOTALS)
      UNROLL(r, R) UNROLL(c, C) sums[r][c] = T::unit_start(p, at.row + r, group);
    auto step = [&](auto inputs_of) __attribute__((always_inline)) {
      const char* w = at.w + (k - at.from) * COLS * T::BITS / 8;
      auto row = [&](int c) __attribute__((always_inline)) {
        const char* vector = w + (c / VECTORS) * panel + (c % VECTORS) * VECTOR_BYTES<T>;
        // once for each line of floats; to fetch a line of codes once only was slower
        if (c % (64 / sizeof(Floats)) == 0) fetch_near(vector + AHEAD);
        typename T::Row found = T::row(vector, scales[c]);
        if constexpr (T::BITS == 12)
          if (__builtin_expect(vector == outliers.at[c / VECTORS], 0)) found = outliers.put(found, c / VECTORS);
        if constexpr (T::KEEPS) T::keep((typename T::Number*)at.numbers + (k - at.from) * COLS, c, found);
        return found;
      };
      if constexpr (ADDS_FROM_MEMORY && !(IS_UNPACKED<T> && REGISTERS == 16)) {
        typename T::Row rows[C];
        UNROLL(c, C) rows[c] = row(c);
        UNROLL(r, R) {
          auto inputs = inputs_of(x + r * K + k);
          UNROLL(c, C) sums[r][c] = T::add(inputs, rows[c], sums[r][c]);
        }
      } else {
        typename T::X inputs[R];
        UNROLL(r, R) inputs[r] = inputs_of(x + r * K + k);
        UNROLL(c, C) {
          typename T::Row one = row(c);
          UNROLL(r, R) sums[r][c] = T::add(inputs[r], one, sums[r][c]);
        }
      }
    };
    for (; k + T::PAIR <= end; k += T::PAIR) step(T::inputs);
    if constexpr (T::PAIR == 2)
      if (k < end) step(T::last);
    if constexpr (T::HAS_TOTALS) add_unit(p, at.panel, group, sums, groups, totals);
  });
  if (at.to < p.K) {
    UNROLL(r, R) UNROLL(c, C) store(at.sums + r * COLS + c * LANES, results[r][c]);
    return;
  }
  put_all<T>(p, at, results);
}

template <class T, int PANELS, int R>
void tile_of(int64_t rows, const Product& p, const Place& at) {
  if (rows == R) return tile<T, R, PANELS>(p, at);
  if constexpr (R > (T::KEEPS ? TALL / 2 : 1)) tile_of<T, PANELS, R - 1>(rows, p, at);
}

template <class T>
void tile_in(Vectors&, int64_t rows, const Product& p, const Place& at) {
  tile_of<T, 1, TALL>(rows, p, at);
}

#if defined(__AMX_BF16__)
// Keeps codes as numbers of x's kind.
template <class T>
void widen(const Product& p, const Place& at) {
  by_groups<T>(p, at.from, at.to, [&](int64_t k, int64_t end, int64_t group) {
    typename T::Scale scales[VECTORS];
    UNROLL(c, VECTORS) scales[c] = T::scale(p, at.panel, c, group);
    for (; k < end; k += T::PAIR) {
      const char* w = at.w + (k - at.from) * COLS * T::BITS / 8;
      UNROLL(c, VECTORS) T::keep((typename T::Number*)at.numbers + (k - at.from) * COLS, c, T::row(w + c * VECTOR_BYTES<T>, scales[c]));
    }
  });
}

template <class T>
void tile_in(Tiles& tiles, int64_t rows, const Product& p, const Place& at) {
  const uint16_t* x = (const uint16_t*)p.x + at.row * p.K + at.from;
  if constexpr (IS_WIDENED<T>) widen<T>(p, at);
  const char* w = IS_WIDENED<T> ? (const char*)at.numbers : at.w;
  tiles.add(rows, x, p.K, at.to - at.from, w, at.sums, !at.from);
  if (at.to < p.K) return;
  UNROLL(c, VECTORS) {
    int64_t column = at.panel * COLS + c * LANES;
    Floats scale = p.form == INT8 ? scales_of(p, at.panel, c, 0) : all(1.0f);
    for (int64_t r = 0; r < rows && column < p.N; r++)
      put(p, at.row + r, column, mul(load(at.sums + r * COLS + c * LANES), scale));
  }
}
#endif

// Rows [first,last) of a panel: blocks of inputs, whose part of the panel all tiles read.
template <class T>
void many_rows(const Product& p, int64_t panel, int64_t first, int64_t last, typename T::Registers& registers) {
  using Number = typename T::Number;
  constexpr int64_t TALL = T::Registers::TALL;
  constexpr int64_t BLOCK = BLOCK_BYTES / sizeof(Number);
  alignas(64) float sums[T::Registers::ROWS * COLS];
  alignas(64) Number numbers[IS_WIDENED<T> ? (BLOCK + BLOCK / 2 + 1) * COLS : 1];
  int64_t rows = last - first, tiles = (rows + TALL - 1) / TALL, from = 0;
  do {
    int64_t block = T::HAS_TOTALS ? (p.group < BLOCK ? BLOCK / p.group : 1) * p.group : BLOCK;  // of whole groups
    int64_t to = from + block + block / 2 < p.K ? from + block : p.K;
    const char* w = (const char*)p.w + panel * panel_bytes<T>(p.K) + from * COLS * T::BITS / 8;
    const char* next = (const char*)p.w + panel * panel_bytes<T>(p.K) + to * COLS * T::BITS / 8;  // or the next panel
    int64_t bytes = (to - from) * COLS * T::BITS / 8;
    for (int64_t i = 0; i < tiles; i++) {
      for (int64_t b = bytes * i / tiles; b < bytes * (i + 1) / tiles; b += 64) fetch_far(next + b);
      int64_t row = rows * i / tiles, end = rows * (i + 1) / tiles;  // tiles of like height
      Place at{first + row, panel, from, to, w, sums + row * COLS, numbers};
      if (!i) {
        tile_in<Kept<T>>(registers, end, p, at);
        if (IS_WIDENED<T>) w = (const char*)numbers;  // for the other tiles
      } else tile_in<typename T::Plain>(registers, end - row, p, at);
    }
    from = to;
  } while (from < p.K);
}

// One tile of rows: weights become numbers in registers.
template <class T>
void few_rows(const Product& p, int64_t first, int64_t last) {
  for (int64_t i = first; i < last;) {
    Place at{0, i, 0, p.K, (const char*)p.w + i * panel_bytes<T>(p.K), nullptr, nullptr};
    bool is_wide = p.M <= SHORT && i + MOST_PANELS <= last;
    if (is_wide) tile_of<T, MOST_PANELS, SHORT>(p.M, p, at);
    else tile_of<T, 1, TALL>(p.M, p, at);
    i += is_wide ? MOST_PANELS : 1;
  }
}

template <class T>
void panels(const Product& p, int64_t first, int64_t last) {
  constexpr int64_t TALL = T::Registers::TALL, ROWS = T::Registers::ROWS;
  if constexpr (!T::Registers::ARE_TILES)
    if (p.M <= TALL) return few_rows<T>(p, first, last);
  typename T::Registers registers;
  int64_t fit = L2 / ((p.K + 1) * int64_t(sizeof(typename T::Number))) / TALL * TALL;
  int64_t most = fit < 4 * TALL ? 4 * TALL : fit < ROWS ? fit : ROWS, chunks = (p.M + most - 1) / most;
  for (int64_t i = 0; i < chunks; i++)
    for (int64_t panel = first; panel < last; panel++) many_rows<T>(p, panel, p.M * i / chunks, p.M * (i + 1) / chunks, registers);
}

// The largest magnitude of a row, or a NaN if it has one: as bits, NaN is above all numbers.
template <class T>
float largest_of(const T* x, int64_t K) {
  Bits top = as_bits(zeros());
  for (int64_t k = 0; k < K; k += LANES) top = larger_bits(as_bits(magnitude(read(x + k, K - k))), top);
  uint32_t each[LANES], largest = 0;
  store_bits(each, top);
  for (uint32_t one : each) largest = one > largest ? one : largest;
  return as_float(largest);
}

template <class T>
void code_rows(const RowCoding& c, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++) {
    const T* x = (const T*)c.x + r * c.K;
    int8_t* codes = c.codes + r * c.width();
    float largest = largest_of(x, c.K);
    bool has_codes = largest > 127 / __FLT_MAX__ && largest <= __FLT_MAX__;
    Floats inverse = all(has_codes ? 127 / largest : 0);
    int64_t k = 0;
    for (; k + LANES <= c.K; k += LANES) store_codes(codes + k, mul(read(x + k, LANES), inverse));
    int8_t some[LANES];
    if (k < c.K) store_codes(some, mul(read(x + k, c.K - k), inverse));
    __builtin_memcpy(codes + k, some, c.width() - k);
    if (!has_codes) __builtin_memset(codes, 0, c.width());  // what is not finite has none
    int32_t sum = 0;
    for (k = 0; BYTE_OFFSET && k < c.K; k++) sum += codes[k];
    c.rows[r] = {largest * (1.0f / 127), -BYTE_OFFSET * sum};
  }
}

// -8 times the sums of units: of all codes, or of those that are added up in each half.
void start_units(const int8_t* codes, int64_t units, int64_t unit, uint32_t* starts) {
  for (int64_t u = 0; u < units; u++, codes += unit) {
    int32_t low = 0, high = 0;
    for (int64_t k = 0; k < unit; k += 4) {
      low += codes[k] + codes[k + 1];
      high += codes[k + 2] + codes[k + 3];
    }
    starts[u] = HALVES_FIT ? uint16_t(-8 * low) | uint32_t(-8 * high) << 16 : uint32_t(-8 * (low + high));
  }
}

}  // namespace

const Products products = {
    {panels<Bf16>, panels<Int8<Bf16>>, panels<Int4<Bf16>>, HAS_BF12 ? panels<Bf12> : nullptr, panels<Codes>, panels<Nibbles>},
    {panels<F32>, panels<Int8<F32Pairs>>, panels<Int4<F32Pairs>>, nullptr, panels<Codes>, panels<Nibbles>},
    code_rows<uint16_t>,
    code_rows<float>,
    start_units,
    HALVES_FIT ? HALVES_FIT : LONGEST_GROUP,
};

}  // namespace ISA
