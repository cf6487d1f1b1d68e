// Tiles of attention: products of queries and keys, the softmax over a block of keys, products with values; and heads
// that are turned and written.
#include "attention.h"

#include "softmax.h"

namespace ISA {
namespace {

constexpr int COLUMNS = REGISTERS / 8;       // vectors of one product
constexpr int GROUP = 6;                     // queries of one: their sums and a row of keys fill the registers

alignas(64) const uint32_t NOTHING[MOST_SIZE] = {};  // in place of heads that no query sees

// Numbers of type T become words: two of them where PAIRS, else a float.
template <class T, bool PAIRS>
struct Words {
  static constexpr int EACH = PAIRS ? 2 : 1;

  static Floats at(const char* head, int64_t word, int64_t n) {
    if constexpr (PAIRS) return as_floats(first_words(head + word * 4, n - word));
    else if constexpr (sizeof(T) == 2) return widened((const uint16_t*)head + word);
    else return load((const float*)head + word);
  }
  static Floats multiplied(Floats a, Floats b, Floats sum) {
    if constexpr (PAIRS) return add_products(as_bits(a), as_bits(b), sum);
    else return fma(a, b, sum);
  }
};

template <int N>
struct Constant {
  static constexpr int value = N;
};

template <class F>
inline void with_constant(int n, F f) {
  switch (n) {
    case 1: return f(Constant<1>());
    case 2: return f(Constant<2>());
    case 3: return f(Constant<3>());
    case 4: return f(Constant<4>());
    case 5: return f(Constant<5>());
    default: return f(Constant<GROUP>());
  }
}

// Where the heads of a block's keys and values are.
struct Heads {
  const char *k[BLOCK], *v[BLOCK];

  Heads(const Attention& a, const Tile& t, int64_t at) {
    int64_t from = at > t.low ? at : t.low, until = at + BLOCK < t.end ? at + BLOCK : t.end, size = a.bytes();
    int64_t root = a.root && a.root[t.row] < until ? a.root[t.row] : until;
    for (int j = 0; j < BLOCK; j++) k[j] = v[j] = (const char*)NOTHING;
    for (int64_t p = from; p < root;) {
      int64_t entry = p / a.W, offset = p % a.W, page = a.table[t.row * a.M + (entry < a.M ? entry : a.M - 1)];
      page = page < 0 ? 0 : page < a.P ? page : a.P - 1;
      int64_t place = ((t.head * a.P + page) * a.W + offset) * size;
      for (int64_t end = p + a.W - offset; p < end && p < root; p++, place += size) {
        k[p - at] = a.k + place;
        v[p - at] = a.v + place;
      }
    }
    for (int64_t p = from > root ? from : root; p < until; p++) {
      int64_t i = p - root < a.path ? p - root : a.path - 1, place = ((t.row * a.path + i) * a.K + t.head) * size;
      k[p - at] = a.own_k + place;
      v[p - at] = a.own_v + place;
    }
  }
};

// Fetches the heads of the block that comes next, line by line beside the work on this one: many at once wait for one
// another.
struct Ahead {
  Heads heads;
  int64_t bytes, from = 0;
  int key = 0;

  INLINE void fetch(int lines) {
    for (; lines && key < BLOCK; lines--) {
      fetch_far(heads.k[key] + from);
      fetch_far(heads.v[key] + from);
      if ((from += 64) >= bytes) key++, from = 0;
    }
  }
};

template <class T, bool PAIRS>
void pack_keys(const Heads& heads, int64_t H, Ahead& ahead, uint32_t* to) {  // [words][BLOCK]
  using W = Words<T, PAIRS>;
  int64_t n = H / W::EACH;
  for (int64_t w = 0; w < n; w += LANES)
    for (int j = 0; j < BLOCK; j += LANES) {
      Floats x[LANES];
      UNROLL(i, LANES) x[i] = W::at(heads.k[j + i], w, n);
      transpose(x);
      UNROLL(i, LANES) store((float*)to + (w + i) * BLOCK + j, x[i]);
      ahead.fetch((j + LANES) * LANES / BLOCK - j * LANES / BLOCK);
    }
}

template <class T, bool PAIRS>
void pack_values(const Heads& heads, int64_t H, Ahead& ahead, uint32_t* to) {  // [BLOCK][H], or [pairs of keys][H]
  using W = Words<T, PAIRS>;
  for (int j = 0; j < BLOCK; j += W::EACH)
    for (int64_t h = 0; h < H; h += LANES) {
      if (h % 64 == 0) ahead.fetch(1);
      const uint16_t *even = (const uint16_t*)heads.v[j] + h, *odd = (const uint16_t*)heads.v[j + W::EACH - 1] + h;
      if constexpr (PAIRS) store_bits(to + j / 2 * H + h, paired(even, odd));
      else store((float*)to + j * H + h, W::at(heads.v[j], h, H));
    }
}

template <class W, int R>
void multiply_keys(const uint32_t* q, const uint32_t* k, int64_t n, Ahead& ahead, float* scores) {
  for (int at = 0; at < BLOCK; at += COLUMNS * LANES) {
    Floats sum[R][COLUMNS];
    UNROLL(r, R) UNROLL(c, COLUMNS) sum[r][c] = zeros();
    for (int64_t w = 0; w < n; w++) {
      ahead.fetch(1);
      Floats b[COLUMNS];
      UNROLL(c, COLUMNS) b[c] = load((const float*)k + w * BLOCK + at + c * LANES);
      UNROLL(r, R) {
        Floats a = spread(q + r * n + w);
        UNROLL(c, COLUMNS) sum[r][c] = W::multiplied(a, b[c], sum[r][c]);
      }
    }
    UNROLL(r, R) UNROLL(c, COLUMNS) store(scores + r * BLOCK + at + c * LANES, sum[r][c]);
  }
}

template <class W, int R, int C>
void add_values(const float* weights, const uint32_t* v, const float* fade, int64_t H, Ahead& ahead, float* sums) {
  Floats sum[R][C];
  UNROLL(r, R) UNROLL(c, C) sum[r][c] = mul(load(sums + r * H + c * LANES), all(fade[r]));
  for (int j = 0; j < BLOCK / W::EACH; j++) {
    ahead.fetch(1);
    Floats b[C];
    UNROLL(c, C) b[c] = load((const float*)v + j * H + c * LANES);
    UNROLL(r, R) {
      Floats a = spread((const uint32_t*)weights + r * BLOCK + j);
      UNROLL(c, C) sum[r][c] = W::multiplied(a, b[c], sum[r][c]);
    }
  }
  UNROLL(r, R) UNROLL(c, C) store(sums + r * H + c * LANES, sum[r][c]);
}

// A query's products with a block of keys become its weights, 0 outside of [first,end); returns by what its sums
// so far are to be multiplied.
template <bool PAIRS>
float weigh(const Attention& a, int first, int end, float* scores, float& top, float& total) {
  constexpr int N = BLOCK / LANES;
  Floats x[N], high = all(UNSEEN), sum = zeros();
  UNROLL(i, N) {
    x[i] = mul(load(scores + i * LANES), all(a.scale));
    if (a.softcap) x[i] = mul(tanh_of(quotient(x[i], all(a.softcap))), all(a.softcap));
    high = larger(where(lanes(first - i * LANES, end - i * LANES), x[i], all(UNSEEN)), high);
  }
  float now = highest(high);
  now = now > top ? now : top;
  UNROLL(i, N) {
    x[i] = where(lanes(first - i * LANES, end - i * LANES), exp_of(sub(x[i], all(now))), zeros());
    sum = add(sum, x[i]);
  }
  if constexpr (PAIRS) UNROLL(i, N / 2) store_bits(scores + i * LANES, in_order(x[2 * i], x[2 * i + 1]));
  else UNROLL(i, N) store(scores + i * LANES, x[i]);
  float fade = first_of(exp_of(all(top - now)));
  total = total * fade + sum_of(sum);
  top = now;
  return fade;
}

// The keys of a block that a query sees, as numbers in the block.
struct Seen {
  int first, end;

  Seen(const Attention& a, const Tile& t, int64_t r, int64_t at) {
    int64_t position = a.start[t.row] + (t.first + r) / a.G, low = a.low(position) - at, high = position + 1 - at;
    first = int(low < 0 ? 0 : low < BLOCK ? low : BLOCK);
    end = int(high < 0 ? 0 : high < BLOCK ? high : BLOCK);
  }
};

// A group's queries and a block of keys that are packed.
template <class W>
void add_block(const Attention& a, const Tile& t, int64_t at, int64_t r, int n, const Workspace& work, Ahead& ahead,
               Running to) {
  alignas(64) float scores[GROUP * BLOCK], fade[GROUP];
  int64_t size = a.H / W::EACH;
  with_constant(n, [&](auto R) { multiply_keys<W, R.value>(work.q + r * size, work.k, size, ahead, scores); });
  for (int i = 0; i < n; i++) {
    Seen seen(a, t, r + i, at);
    fade[i] = weigh<W::EACH == 2>(a, seen.first, seen.end, scores + i * BLOCK, to.top[r + i], to.total[r + i]);
  }
  for (int64_t h = 0; h < a.H; h += COLUMNS * LANES) {
    int64_t left = (a.H - h) / LANES;
    const uint32_t* v = work.v + h;
    float* sums = to.sums + r * a.H + h;
    with_constant(n, [&](auto R) {
      if (left >= COLUMNS) return add_values<W, R.value, COLUMNS>(scores, v, fade, a.H, ahead, sums);
      if constexpr (COLUMNS > 2)
        if (left == 3) return add_values<W, R.value, 3>(scores, v, fade, a.H, ahead, sums);
      if constexpr (COLUMNS > 2)
        if (left == 2) return add_values<W, R.value, 2>(scores, v, fade, a.H, ahead, sums);
      add_values<W, R.value, 1>(scores, v, fade, a.H, ahead, sums);
    });
  }
}

template <class T, bool PAIRS>
void pack_queries(const Attention& a, const Tile& t, uint32_t* to) {
  using W = Words<T, PAIRS>;
  int64_t n = a.H / W::EACH;
  for (int64_t i = 0; i < t.rows; i++) {
    int64_t token = (t.first + i) / a.G, member = (t.first + i) % a.G;
    const char* q = a.q + (((t.row * a.T + token) * a.K + t.head) * a.G + member) * a.bytes();
    if constexpr (sizeof(T) == 2 && !PAIRS) for (int64_t w = 0; w < n; w += LANES) store((float*)to + i * n + w, W::at(q, w, n));
    else __builtin_memcpy(to + i * n, q, a.bytes());
  }
}

void clear(const Tile& t, int64_t H, Running s) {
  for (int64_t i = 0; i < t.rows; i++) s.top[i] = UNSEEN, s.total[i] = 0;
  for (int64_t i = 0; i < t.rows * H; i += LANES) store(s.sums + i, zeros());
}

template <class T, bool PAIRS>
void part_of(const Attention& a, const Tile& t, int64_t part, const Tile* next, Workspace& work, Running to) {
  using W = Words<T, PAIRS>;
  pack_queries<T, PAIRS>(a, t, work.q);
  clear(t, a.H, to);
  int64_t from = part * PART > t.low ? part * PART : t.low, end = (part + 1) * PART < t.end ? (part + 1) * PART : t.end;
  int64_t at = from / BLOCK * BLOCK;
  Heads heads(a, t, at);
  for (; at < end; at += BLOCK) {
    bool goes_to_next = at + BLOCK >= t.end && next;
    Ahead ahead{goes_to_next ? Heads(a, *next, next->low / BLOCK * BLOCK) : Heads(a, t, at + BLOCK), a.bytes()};
    pack_keys<T, PAIRS>(heads, a.H, ahead, work.k);
    pack_values<T, PAIRS>(heads, a.H, ahead, work.v);
    int64_t groups = (t.rows + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < groups; g++) {  // of like size
      int64_t r = t.rows * g / groups;
      int n = int(t.rows * (g + 1) / groups - r);
      // later queries begin later and end later
      if (Seen(a, t, r, at).first < BLOCK && Seen(a, t, r + n - 1, at).end > 0)
        add_block<W>(a, t, at, r, n, work, ahead, to);
    }
    heads = ahead.heads;
  }
}

void part(const Attention& a, const Tile& t, int64_t part, const Tile* next, Workspace& work, Running to) {
  if (!a.is_bf16) part_of<float, false>(a, t, part, next, work, to);
  else part_of<uint16_t, HAS_PAIRS>(a, t, part, next, work, to);
}

void begin(const Attention& a, const Tile& t, Running s) {
  clear(t, a.H, s);
  for (int64_t i = 0; a.sinks && i < t.rows; i++) {
    s.top[i] = a.sinks[t.head * a.G + (t.first + i) % a.G];
    s.total[i] = 1;
  }
}

void add_part(const Attention& a, const Tile& t, Running s, const Running part) {
  for (int64_t i = 0; i < t.rows; i++) {
    if (part.total[i] == 0) continue;  // it has no key that this query sees
    float now = s.top[i] > part.top[i] ? s.top[i] : part.top[i];
    Floats fade = exp_of(all(s.top[i] - now)), weight = exp_of(all(part.top[i] - now));
    s.total[i] = first_of(fma(all(part.total[i]), weight, mul(all(s.total[i]), fade)));
    s.top[i] = now;
    for (int64_t h = i * a.H; h < (i + 1) * a.H; h += LANES)
      store(s.sums + h, fma(load(part.sums + h), weight, mul(load(s.sums + h), fade)));
  }
}

void finish(const Attention& a, const Tile& t, const Running s) {
  for (int64_t i = 0; i < t.rows; i++) {
    int64_t token = (t.first + i) / a.G, member = (t.first + i) % a.G;
    char* out = a.out + (((t.row * a.T + token) * a.K + t.head) * a.G + member) * a.bytes();
    Floats total = larger(all(1e-30f), all(s.total[i]));
    for (int64_t h = 0; h < a.H; h += LANES) {
      Floats y = add(quotient(load(s.sums + i * a.H + h), total), zeros());  // no zero has a sign
      if (a.is_bf16) store_bf16((uint16_t*)out + h, y);
      else store((float*)out + h, y);
    }
  }
}

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
void turn_rows(const Turn& a, int64_t first, int64_t last) {
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

extern const AttentionKernels attention;
const AttentionKernels attention = {begin, part, add_part, finish};
extern const Turns turns;
const Turns turns = {turn_rows<uint16_t>, turn_rows<float>};

}  // namespace ISA
