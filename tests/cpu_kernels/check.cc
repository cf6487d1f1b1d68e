// Compares what kernels compute with plain loops, on arrays without a byte to spare and on threads: for processors that
// are emulated, and for a compiler's sanitizers. FOR_EACH_ISA names the kernels.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "attention.h"
#include "handlers/pool.h"
#include "norm.h"
#include "products.h"

// Threads as XLA's pool has them, which end with the pool.
struct Threads {
  std::vector<std::thread> running;
  int num_threads() const { return 4; }
  void Schedule(std::function<void()> work) { running.emplace_back(std::move(work)); }
  ~Threads() {
    for (auto& thread : running) thread.join();
  }
};

// Floats, or bfloat16, of a kernel's call.
struct Numbers {
  bool is_bf16;
  std::vector<char> bytes;

  Numbers(int64_t count, bool is_bf16) : is_bf16(is_bf16), bytes(count * (is_bf16 ? 2 : 4)) {}
  int64_t size() const { return int64_t(bytes.size()) / (is_bf16 ? 2 : 4); }
  float operator[](int64_t i) const {
    float v = 0;
    if (is_bf16) std::memcpy((char*)&v + 2, &bytes[2 * i], 2);
    else std::memcpy(&v, &bytes[4 * i], 4);
    return v;
  }
  void put(int64_t i, float v) {
    if (is_bf16) std::memcpy(&bytes[2 * i], (char*)&v + 2, 2);
    else std::memcpy(&bytes[4 * i], &v, 4);
  }
};

static int64_t seed = 1;
static float small() { return float((seed = seed * 48271 % 2147483647) % 17 - 8); }  // a whole number: sums are exact
static Numbers some(int64_t count, bool is_bf16, float factor = 1) {
  Numbers made(count, is_bf16);
  for (int64_t i = 0; i < count; i++) made.put(i, small() * factor);
  return made;
}

static void expect(const char* what, float found, double wanted, double off) {
  if (std::fabs(found - wanted) <= off) return;
  std::fprintf(stderr, "%s: %g in place of %g\n", what, found, wanted);
  std::exit(1);
}

// Packed numbers in 12 bits, some of them as outliers.
static std::vector<char> narrowed(const Numbers& numbers, int64_t panels) {
  int64_t size = numbers.size();
  std::vector<char> made(2 * size + panels * COLS * 4);
  auto* outliers = (Outlier*)&made[size * 3 / 2];
  auto* exponents = (Exponents*)&made[2 * size];
  int32_t before = 115, count = 0;
  for (int64_t i = 0; i < size; i++) {
    uint16_t bits;
    std::memcpy(&bits, &numbers.bytes[2 * i], 2);
    int exponent = bits >> 7 & 255;
    char* at = &made[i / 32 * 48];
    if (i % 37 / 2 == 3) outliers[count++] = {uint32_t(i), bits};
    else at[i % 32] = char(bits >> 8 & 128 | bits & 127), at[32 + i % 32 / 2] |= char((exponent ? exponent - before : 0) << i % 2 * 4);
    exponents[i / (size / panels)] = {before, count};
  }
  return made;
}

// A product whose sums no order rounds, of a weight in a form; codes have scales of 0.5.
static void multiply(const Products& kernels, bool is_bf16, Form form, int64_t M, int64_t N, int64_t K, bool y_is_bf16) {
  int64_t panels = (N + COLS - 1) / COLS, pairs = (K + 1) / 2, group = form == INT4 && K % 4 == 0 ? K / 2 : K;
  bool has_pairs = is_bf16 || form != NUMBERS, are_codes = form == INT8 || form == INT4;
  Numbers x = some(M * K, is_bf16), y(M * N, y_is_bf16), scales(are_codes ? panels * (K / group) * COLS : 0, is_bf16);
  for (int64_t i = 0; i < scales.size(); i++) scales.put(i, 0.5);
  Numbers numbers(are_codes ? 0 : panels * COLS * (has_pairs ? 2 * pairs : K), is_bf16);
  std::vector<char> codes(are_codes ? panels * COLS * pairs * (form == INT8 ? 2 : 1) : 0);
  std::vector<float> matrix(N * K);
  for (int64_t n = 0; n < N; n++)
    for (int64_t k = 0; k < K; k++) {
      float v = matrix[n * K + k] = form == INT4 ? std::fmin(small(), 7) : small();
      int64_t panel = n / COLS * (has_pairs ? pairs : K), column = n % COLS;
      int64_t at = has_pairs ? ((panel + k / 2) * COLS + column) * 2 + k % 2 : (panel + k) * COLS + column;
      if (!are_codes) numbers.put(at, v);
      else if (form == INT8) codes[at] = char(int(v));
      else codes[at / 2] |= char((int(v) + 8) << (k % 2 * 4));
    }
  if (form == BF12) codes = narrowed(numbers, panels);
  const char* w = form == NUMBERS ? numbers.bytes.data() : codes.data();
  const char* of = form == BF12 ? w + panels * COLS * pairs * 4 : scales.bytes.data();
  Product p{x.bytes.data(), w, of, y.bytes.data(), M, N, K, group, y_is_bf16, is_bf16, form};
  Panels f = (is_bf16 ? kernels.bf16 : kernels.f32)[form];
  auto check = [&] {
    for (int64_t i = 0; i < M * N; i++) {
      double sum = 0;
      for (int64_t k = 0; k < K; k++) sum += x[i / N * K + k] * matrix[i % N * K + k];
      sum *= are_codes ? 0.5 : 1;
      expect("product", y[i], sum, y_is_bf16 ? std::fabs(sum) / 256 : 0);
      y.put(i, NAN);
    }
  };
  {
    Threads pool;
    parallel(pool, panels, panels, [&](int64_t i) { f(p, i, i + 1); });
  }
  check();
  f(p, 0, panels);
  check();
}

// Rows of a product have the same bits beside any others, also where sums are rounded.
static void multiply_alone(const Products& kernels, bool is_bf16, Form form) {
  constexpr int64_t M = 13, N = 40, K = 90, panels = 2;
  Numbers x = some(M * K, is_bf16, 0.37f), w = some(panels * COLS * K, is_bf16, 0.61f), scales = some(panels * COLS, false, 0.3f);
  for (Numbers* numbers : {&x, &w})
    for (int64_t i = 0; i < numbers->size(); i++) numbers->put(i, (*numbers)[i] * (1 + float(i % 127) / 128));
  Numbers y(M * N, false), one(N, false);
  Panels f = (is_bf16 ? kernels.bf16 : kernels.f32)[form];
  f({x.bytes.data(), w.bytes.data(), scales.bytes.data(), y.bytes.data(), M, N, K, K, false, false, form}, 0, panels);
  for (int64_t r = 0; r < M; r++) {
    f({&x.bytes[r * K * (is_bf16 ? 2 : 4)], w.bytes.data(), scales.bytes.data(), one.bytes.data(), 1, N, K, K, false, false, form}, 0, panels);
    if (std::memcmp(&y.bytes[r * N * 4], one.bytes.data(), N * 4)) expect("bits of a row alone", 0, r + 1, 0);
  }
}

// The code of x in a row whose largest magnitude is this.
static int code_of(float x, float largest) {
  bool has_codes = largest > 127 / __FLT_MAX__ && largest <= __FLT_MAX__;
  return has_codes ? int(std::nearbyint(x * (127 / largest))) : 0;
}

// Rows of numbers that no code has exactly, as codes with those of a weight. Of four rows one is 0, one not finite.
static void multiply_codes(const Products& kernels, bool is_bf16, int64_t M, int64_t N, int64_t K, bool y_is_bf16) {
  int64_t panels = (N + COLS - 1) / COLS;
  Numbers x = some(M * K, is_bf16, 0.37f), y(M * N, y_is_bf16), wanted(1, y_is_bf16);
  for (int64_t i = 0; i < M * K; i++) x.put(i, i / K % 4 == 1 ? 0 : x[i] * (1 + float(i % 127) / 128));
  for (int64_t r = 3; r < M; r += 4) x.put(r * K + r % K, r % 8 == 3 ? NAN : -INFINITY);
  std::vector<CodedRow> rows(M);
  RowCoding coding{x.bytes.data(), K, nullptr, rows.data()};
  int64_t width = coding.width();
  std::vector<int8_t> codes(M * width), w(panels * COLS * width), matrix(N * K);
  coding.codes = codes.data();
  std::vector<float> scales(panels * COLS, 0.013f);
  for (int64_t i = 0; i < N * K; i++) {
    int64_t n = i / K, k = i % K;
    matrix[i] = w[((n / COLS * (width / 4) + k / 4) * COLS + n % COLS) * 4 + k % 4] = int8_t(i * 91 % 256 - 128);
  }
  Product p{codes.data(), w.data(), scales.data(), y.bytes.data(), M, N, width, width, y_is_bf16, false, CODES, rows.data()};
  CodeRows code = is_bf16 ? kernels.code_bf16 : kernels.code_f32;
  Panels f = (is_bf16 ? kernels.bf16 : kernels.f32)[CODES];
  Threads pool;
  parallel(pool, M, M, [&](int64_t i) { code(coding, i, i + 1); });
  parallel(pool, panels, panels, [&](int64_t i) { f(p, i, i + 1); });
  for (int64_t r = 0; r < M; r++) {
    float largest = 0;
    for (int64_t k = 0; k < K; k++) largest = std::isnan(x[r * K + k]) ? NAN : std::fmax(largest, std::fabs(x[r * K + k]));
    for (int64_t k = 0; k < width; k++)
      if (k == K || !(r % 4 == 3)) expect("code", codes[r * width + k], k < K ? code_of(x[r * K + k], largest) : 0, 0);
    for (int64_t n = 0; n < N; n++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < K; k++) sum += codes[r * width + k] * matrix[n * K + k];
      float right = (float(sum) * 0.013f) * (largest * (1.0f / 127)), found = y[r * N + n];
      if (r % 4 == 3) expect("a row that is not finite", std::isnan(found), 1, 0);
      else expect("product of codes", found, right, y_is_bf16 ? std::fabs(right) / 256 : 0);
    }
  }
}

// Rows in codes with 4-bit codes, whose groups are added up in floats, in order.
static void multiply_nibbles(const Products& kernels, int64_t M, int64_t N, int64_t K, int64_t group, bool scales_are_bf16) {
  int64_t panels = (N + COLS - 1) / COLS, groups = K / group, parts = 1;
  while (group / parts > kernels.longest_unit || group % (8 * parts)) parts++;
  int64_t unit = group / parts, units = K / unit;
  Numbers x = some(M * K, false, 0.37f), scales(panels * groups * COLS, scales_are_bf16);
  for (int64_t i = 0; i < M * K; i++) x.put(i, x[i] * (1 + float(i % 127) / 128));
  for (int64_t i = 0; i < scales.size(); i++) scales.put(i, 0.013f * small());
  std::vector<CodedRow> rows(M);
  std::vector<int8_t> codes(M * K), matrix(N * K);
  std::vector<uint32_t> starts(M * units);
  std::vector<uint8_t> w(panels * COLS * K / 2);
  std::vector<float> y(M * N);
  for (int64_t i = 0; i < N * K; i++) {
    int64_t n = i / K, k = i % K;
    matrix[i] = int8_t(i < K ? (k % 8 < 4 ? -8 : 7) : i * 91 % 16 - 8);  // the largest sums too
    w[((n / COLS * (K / 8) + k / 8) * COLS + n % COLS) * 4 + k % 4] |= uint8_t((matrix[i] + 8) << (k % 8 / 4 * 4));
  }
  for (int64_t i = 0; i < K && M; i++) x.put(i, i % 8 < 4 ? -1.0f : 1.0f);
  Product p{codes.data(), w.data(), scales.bytes.data(), y.data(), M, N, K, group, false, scales_are_bf16, NIBBLES, rows.data(), unit, starts.data()};
  kernels.code_f32({x.bytes.data(), K, codes.data(), rows.data()}, 0, M);
  kernels.start_units(codes.data(), M * units, unit, starts.data());
  Threads pool;
  parallel(pool, panels, panels, [&](int64_t i) { kernels.bf16[NIBBLES](p, i, i + 1); });
  for (int64_t i = 0; i < M * N; i++) {
    int64_t m = i / N, n = i % N;
    float total = 0;
    for (int64_t g = 0; g < groups; g++) {
      int32_t sum = 0;
      for (int64_t k = g * group; k < (g + 1) * group; k++) sum += codes[m * K + k] * matrix[n * K + k];
      total += float(sum) * scales[(n / COLS * groups + g) * COLS + n % COLS];
    }
    expect("product of nibbles", y[i], total * rows[m].scale, 0);
  }
}

// How a float is rounded to bfloat16, and that NaN stays NaN and denormals count as zero.
static void round_all(const Products& kernels) {
  const uint32_t given[] = {0x3f808000, 0x3f818000, 0x3f808001, 0x7f800001, 0x00400000, 0xbf808000};
  const uint16_t wanted[] = {0x3f80, 0x3f82, 0x3f81, 0x7fc0, 0, 0xbf80};
  constexpr int64_t N = 6;
  float x = 1, w[COLS] = {};
  uint16_t y[N];
  std::memcpy(w, given, sizeof given);
  Threads pool;
  parallel(pool, 1, 1, [&](int64_t) { kernels.f32[NUMBERS]({&x, w, nullptr, y, 1, N, 1, 1, true, false, NUMBERS}, 0, 1); });
  for (int64_t i = 0; i < N; i++)
    if (y[i] != wanted[i]) expect("rounding", y[i], wanted[i], 0);
}

// A scale that is NaN, whatever its bits, makes its output NaN, and no other.
static void multiply_nan(const Products& kernels) {
  constexpr int64_t K = 2, N = 5;
  for (bool is_bf16 : {false, true}) {
    Numbers x(K, is_bf16);
    std::vector<char> w(COLS, 0x5a);
    float scales[COLS] = {1, 1, 1, 1, 1}, y[N];
    const uint32_t nans[] = {0x7fffffff, 0xffffffff, 0x7f800001};
    std::memcpy(scales + 1, nans, sizeof nans);
    for (int64_t k = 0; k < K; k++) x.put(k, 1);
    (is_bf16 ? kernels.bf16 : kernels.f32)[INT4]({x.bytes.data(), w.data(), scales, y, 1, N, K, K, false, false, INT4}, 0, 1);
    for (int64_t n = 0; n < N; n++) expect("a scale that is NaN", std::isnan(y[n]), n >= 1 && n < 4, 0);
  }
}

static void multiply_all(const Products& kernels) {
  round_all(kernels);
  multiply_nan(kernels);
  for (bool is_bf16 : {false, true})
    for (Form form : {NUMBERS, INT8, INT4}) multiply_alone(kernels, is_bf16, form);
  for (int64_t M : {0, 1, 3, 8, 26})
    for (int64_t group : {8, 32, 72, 128, 640}) multiply_nibbles(kernels, M, M % 2 ? 33 : 70, group < 640 ? 5 * group : 1280, group, M % 2);
  for (int64_t M : {0, 1, 2, 7, 13, 32, 250})
    for (int64_t N : {1, 33, 100})
      for (int64_t K : {1, 7, 64, 385, 1025, 1028})
        for (bool is_bf16 : {false, true}) {
          if (M * N * K < 80000) multiply_codes(kernels, is_bf16, M, N, K, !is_bf16);
          for (Form form : {NUMBERS, INT8, INT4, BF12}) {
            bool is_there = (is_bf16 ? kernels.bf16 : kernels.f32)[form];
            if (is_there && (form != INT4 || K % 2 == 0) && M * N * K < 80000) multiply(kernels, is_bf16, form, M, N, K, !is_bf16);
          }
        }
}

// Two rows over pages, of which the second's tokens are a chunk, with what a layer may ask for.
static void attend(const AttentionKernels& kernels, int64_t H, bool is_bf16, int64_t window, bool extras) {
  constexpr int64_t B = 2, T = 24, K = 2, G = 3, W = 16, M = 24, path = 4;
  Numbers q = some(B * T * K * G * H, is_bf16, 0.0625), k = some(K * B * M * W * H, is_bf16, 0.125), v = some(k.size(), is_bf16);
  Numbers own_k = some(B * path * K * H, is_bf16, 0.125), own_v = some(own_k.size(), is_bf16), out(q.size(), is_bf16);
  std::vector<int32_t> table(B * M), start{300, 350}, count{1, T}, root{299, 380};
  for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(table.size() - 1 - i);
  std::vector<float> sinks{0, 1, -1, 0, 2, 0};
  Attention a{q.bytes.data(), k.bytes.data(), v.bytes.data(), table.data(), start.data(), count.data(),
              extras ? sinks.data() : nullptr, own_k.bytes.data(), own_v.bytes.data(), extras ? root.data() : nullptr,
              out.bytes.data(), B, T, K, G, H, B * M, W, M, path, 0.25f, extras ? 5.0f : 0.0f, window, false, is_bf16};
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < B * K; i++)
    for (int64_t row = i / K, rows = count[row] * G, first = 0; first < rows; first += MOST_ROWS)
      tiles.push_back({row, i % K, first, std::min<int64_t>(MOST_ROWS, rows - first), a.low(start[row] + first / G),
                       start[row] + count[row]});
  {
    Threads pool;
    parallel(pool, tiles.size(), tiles.size(), [&](int64_t i) {
      const Tile& t = tiles[i];
      std::unique_ptr<Workspace> own(new Workspace);
      Running all(own->running[0], t.rows), part(own->running[1], t.rows);
      kernels.begin(a, t, all);
      for (int64_t p = 0; p < t.parts(); p++) {
        kernels.part(a, t, t.first_part() + p, i + 1 < int64_t(tiles.size()) ? &t + 1 : nullptr, *own, part);
        kernels.add(a, t, all, part);
      }
      kernels.finish(a, t, all);
    });
  }
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < count[b] * K * G; i++) {
      int64_t head = i / G % K, position = start[b] + i / (K * G), query = (b * T * K * G + i) * H;
      std::vector<double> sums(H);
      double total = extras ? std::exp(sinks[i % (K * G)]) : 0;
      for (int64_t s = a.low(position); s <= position; s++) {
        bool is_own = extras && s >= root[b];
        int64_t own = ((b * path + std::min<int64_t>(s - root[b], path - 1)) * K + head) * H;
        int64_t at = is_own ? own : ((head * B * M + table[b * M + s / W]) * W + s % W) * H;
        const Numbers &keys = is_own ? own_k : k, &values = is_own ? own_v : v;
        double score = 0;
        for (int64_t h = 0; h < H; h++) score += q[query + h] * keys[at + h];
        score *= 0.25;
        if (extras) score = 5 * std::tanh(score / 5);
        total += std::exp(score);
        for (int64_t h = 0; h < H; h++) sums[h] += std::exp(score) * values[at + h];
      }
      for (int64_t h = 0; h < H; h++) expect("attention", out[query + h], sums[h] / total, is_bf16 ? 0.06 : 1e-4);
    }
}

static void attend_all(const AttentionKernels& kernels) {
  for (int64_t H : {16, 80, 256})
    for (int64_t window : {0, 40})
      for (bool is_bf16 : {false, true})
        for (bool extras : {false, true}) attend(kernels, H, is_bf16, window, extras);
}

// Rows of new heads, of which every other one is dropped.
static void turn(const Turns& kernels, int64_t H, int64_t pairs, bool is_bf16) {
  constexpr int64_t rows = 5, N = 6, K = 2, P = 3, W = 4;
  Numbers q = some(rows * N * H, is_bf16), k = some(rows * K * H, is_bf16), v = some(k.size(), is_bf16), out(q.size(), is_bf16);
  Numbers keys(K * P * W * H, is_bf16), values(keys.size(), is_bf16), cos = some(rows * pairs, false, 0.125), sin = some(rows * pairs, false, 0.125);
  std::vector<int32_t> page{0, P, 2, -1, 1}, offset{0, 0, W - 1, 1, 2};
  Turn a{q.bytes.data(), k.bytes.data(), v.bytes.data(), (const float*)cos.bytes.data(), (const float*)sin.bytes.data(),
         page.data(), offset.data(), out.bytes.data(), keys.bytes.data(), values.bytes.data(), rows, N, K, H, P, W, pairs};
  {
    Threads pool;
    parallel(pool, rows, rows, [&](int64_t i) { (is_bf16 ? kernels.bf16 : kernels.f32)(a, i, i + 1); });
  }
  auto turned = [&](const Numbers& x, int64_t head, int64_t r, int64_t h) {
    if (h >= 2 * pairs) return double(x[head + h]);
    int64_t i = h % pairs, other = head + (h < pairs ? h + pairs : h - pairs);
    return x[head + h] * double(cos[r * pairs + i]) + (h < pairs ? -1 : 1) * x[other] * double(sin[r * pairs + i]);
  };
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < (N + K) * H; i++) {
      int64_t head = i / H, h = i % H, key = head - N, at = ((key * P + page[r]) * W + offset[r]) * H + h;
      if (key < 0) expect("turn", out[(r * N + head) * H + h], turned(q, (r * N + head) * H, r, h), is_bf16 ? 0.1 : 1e-5);
      else if (page[r] >= 0 && page[r] < P) {
        expect("key", keys[at], turned(k, (r * K + key) * H, r, h), is_bf16 ? 0.1 : 1e-5);
        expect("value", values[at], v[(r * K + key) * H + h], 0);
      }
    }
}

static void turn_all(const Turns& kernels) {
  for (bool is_bf16 : {false, true})
    for (int64_t H : {16, 80, 256})
      for (int64_t pairs : {int64_t(1), int64_t(5), H / 2}) turn(kernels, H, pairs, is_bf16);
}

static void normalise(const Norms& kernels, int64_t D, bool is_bf16, bool is_layer) {
  constexpr int64_t rows = 6, groups = 2;
  Numbers x = some(rows * D, is_bf16), gain = some(groups * D, is_bf16), bias = some(groups * D, is_bf16), y(x.size(), is_bf16);
  Norm a{x.bytes.data(), gain.bytes.data(), is_layer ? bias.bytes.data() : nullptr, y.bytes.data(), rows, D, groups, 1e-5f,
         is_layer ? 0.0f : 1.0f, is_layer};
  (is_bf16 ? kernels.bf16 : kernels.f32)(a, 0, rows);
  for (int64_t r = 0; r < rows; r++) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < D && is_layer; i++) mean += x[r * D + i] / double(D);
    for (int64_t i = 0; i < D; i++) squares += (x[r * D + i] - mean) * (x[r * D + i] - mean) / D;
    for (int64_t i = 0; i < D; i++) {
      double g = gain[r % groups * D + i] + a.offset, b = is_layer ? bias[r % groups * D + i] : 0;
      expect("norm", y[r * D + i], (x[r * D + i] - mean) / std::sqrt(squares + 1e-5) * g + b, is_bf16 ? 0.3 : 1e-4);
    }
  }
}

static void normalise_all(const Norms& kernels) {
  for (int64_t D : {1, 5, 37, 576})
    for (bool is_bf16 : {false, true})
      for (bool is_layer : {false, true}) normalise(kernels, D, is_bf16, is_layer);
}

int main() {
#define RUN(isa)                   \
  multiply_all(isa::products);     \
  attend_all(isa::attention);      \
  turn_all(isa::turns);            \
  normalise_all(isa::norms);       \
  std::printf("%s\n", #isa);
  FOR_EACH_ISA(RUN)
}
