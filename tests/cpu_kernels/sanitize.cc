// Runs the kernels on arrays without a byte to spare, on threads, for a compiler's sanitizers.
#include <cstdio>
#include <thread>
#include <vector>

#include "attention.h"
#include "handlers/pool.h"
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

static void run(const Products& kernels, bool is_bf16, Form form, int64_t M, int64_t N, int64_t K, bool y_is_bf16) {
  int64_t size = is_bf16 ? 2 : 4, pairs = (K + 1) / 2, panels = (N + COLS - 1) / COLS;
  int64_t group = form == INT4 && K % 4 == 0 ? K / 2 : K;
  int64_t numbers = (is_bf16 ? 2 * pairs : K) * size, bytes = form == NUMBERS ? numbers : form == INT8 ? 2 * pairs : pairs;
  std::vector<char> x(M * K * size), w(panels * COLS * bytes), y(M * N * (y_is_bf16 ? 2 : 4));
  std::vector<char> scales(form == NUMBERS ? 0 : panels * (K / group) * COLS * size);
  Product p{x.data(), w.data(), scales.data(), y.data(), M, N, K, group, y_is_bf16, is_bf16, form};
  Threads pool;
  parallel(pool, panels, panels, [&](int64_t i) { (is_bf16 ? kernels.bf16 : kernels.f32)[form](p, i, i + 1); });
  (is_bf16 ? kernels.bf16 : kernels.f32)[form](p, 0, panels);
}

static void run_all(const char* name, const Products& kernels) {
  for (int64_t M : {0, 1, 2, 7, 13, 32, 250})
    for (int64_t N : {1, 33, 100})
      for (int64_t K : {1, 7, 64, 385, 1025, 1028})
        for (Form form : {NUMBERS, INT8, INT4})
          for (bool is_bf16 : {false, true})
            if (form != INT4 || K % 2 == 0) run(kernels, is_bf16, form, M, N, K, !is_bf16);
  std::printf("%s\n", name);
}

// Two rows over pages, of which the second's tokens are a chunk, with what a layer may ask for.
static void attend(const AttentionKernels& kernels, int64_t H, bool is_bf16, int64_t window, bool extras) {
  constexpr int64_t B = 2, T = 30, K = 2, G = 3, W = 16, M = 24, path = 4;
  int64_t size = H * (is_bf16 ? 2 : 4);
  std::vector<char> q(B * T * K * G * size), k(K * B * M * W * size), v(k.size()), own(B * path * K * size), out(q.size());
  std::vector<int32_t> table(B * M), start{300, 350}, count{1, T}, root{299, 380};
  for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(table.size() - 1 - i);
  std::vector<float> sinks(K * G);
  Attention a{q.data(), k.data(), v.data(), table.data(), start.data(), count.data(), extras ? sinks.data() : nullptr,
              own.data(), own.data(), extras ? root.data() : nullptr, out.data(), B, T, K, G, H, B * M, W, M, path,
              1.0f, extras ? 5.0f : 0.0f, window, false, is_bf16};
  Threads pool;
  parallel(pool, B * K, B * K, [&](int64_t i) {
    int64_t row = i / K, rows = count[row] * G, last = start[row] + count[row];
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
      Tile t{row, i % K, first, std::min<int64_t>(MOST_ROWS, rows - first), a.low(start[row] + first / G), last};
      std::unique_ptr<Workspace> own(new Workspace);
      Running all(own->running[0], t.rows), part(own->running[1], t.rows);
      kernels.begin(a, t, all);
      for (int64_t p = 0; p < t.parts(); p++) {
        kernels.part(a, t, t.first_part() + p, *own, part);
        kernels.add(a, t, all, part);
      }
      kernels.finish(a, t, all);
    }
  });
}

static void attend_all(const AttentionKernels& kernels) {
  for (int64_t H : {16, 48, 64, 80, 256})
    for (int64_t window : {0, 40})
      for (bool is_bf16 : {false, true})
        for (bool extras : {false, true}) attend(kernels, H, is_bf16, window, extras);
}

// Rows of new heads, of which every other one is dropped.
static void turn(const Turns& kernels, int64_t H, int64_t pairs, bool is_bf16) {
  constexpr int64_t rows = 5, N = 6, K = 2, P = 3, W = 4;
  int64_t size = H * (is_bf16 ? 2 : 4);
  std::vector<char> q(rows * N * size), k(rows * K * size), v(k.size()), out(q.size()), keys(K * P * W * size), values(keys.size());
  std::vector<float> cos(rows * pairs), sin(rows * pairs);
  std::vector<int32_t> page{0, P, 2, -1, 1}, offset{0, 0, W - 1, 1, 2};
  Turn a{q.data(), k.data(), v.data(), cos.data(), sin.data(), page.data(), offset.data(), out.data(), keys.data(),
         values.data(), rows, N, K, H, P, W, pairs};
  Threads pool;
  parallel(pool, rows, rows, [&](int64_t i) { (is_bf16 ? kernels.bf16 : kernels.f32)(a, i, i + 1); });
}

static void turn_all(const Turns& kernels) {
  for (bool is_bf16 : {false, true})
    for (int64_t H : {16, 80, 256})
      for (int64_t pairs : {int64_t(1), int64_t(5), H / 2}) turn(kernels, H, pairs, is_bf16);
}

static void all(const char* name, const Products& products, const AttentionKernels& attention, const Turns& turns) {
  run_all(name, products);
  attend_all(attention);
  turn_all(turns);
}

int main() {
  if (__builtin_cpu_supports("avx2")) all("avx2", avx2::products, avx2::attention, avx2::turns);
  if (__builtin_cpu_supports("avx512bw")) all("avx512", avx512::products, avx512::attention, avx512::turns);
  if (__builtin_cpu_supports("avx512bf16")) all("avx512_bf16", avx512_bf16::products, avx512_bf16::attention, avx512_bf16::turns);
  if (__builtin_cpu_supports("avx512bf16")) all("avx512_amx, emulated", avx512_amx::products, avx512_amx::attention, avx512_amx::turns);
}
