// Runs the kernels on arrays without a byte to spare, on threads, for a compiler's sanitizers.
#include <cstdio>
#include <thread>
#include <vector>

#include "pool.h"
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

template <class T>
static void run(Panels panels, int64_t M, int64_t N, int64_t K, int64_t depth, bool y_is_bf16) {
  std::vector<T> x(M * K), w((N + COLS - 1) / COLS * COLS * depth);
  std::vector<char> y(M * N * (y_is_bf16 ? 2 : 4));
  Product p{x.data(), w.data(), y.data(), M, N, K, y_is_bf16};
  Threads pool;
  parallel(pool, p.panels(), p.panels(), [=](int64_t i) { panels(p, i, i + 1); });
}

static void run_all(const char* name, const Products& kernels) {
  for (int64_t M : {0, 1, 2, 7, 13, 32, 250})
    for (int64_t N : {1, 33, 100})
      for (int64_t K : {1, 7, 64, 385, 1025})
        for (bool narrow : {false, true}) {
          run<uint16_t>(kernels.bf16, M, N, K, (K + 1) / 2 * 2, narrow);
          run<float>(kernels.f32, M, N, K, K, narrow);
        }
  std::printf("%s\n", name);
}

int main() {
  if (__builtin_cpu_supports("avx2")) run_all("avx2", avx2::products);
  if (__builtin_cpu_supports("avx512bw")) run_all("avx512", avx512::products);
  if (__builtin_cpu_supports("avx512bf16")) run_all("avx512_bf16", avx512_bf16::products);
}
