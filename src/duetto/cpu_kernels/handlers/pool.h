// Work in parts on XLA's threads.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

constexpr int SPINS = 4000;                 // some 50 us, before a waiting thread yields its core
constexpr int64_t LEAST_NUMBERS = 1 << 15;  // of a part: fewer take longer to hand over

// While it lives, denormals count as zero and are written as zero, whatever thread computes.
class WithoutDenormals {
 public:
  WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~WithoutDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// Calls f(i) for each i < n on the caller and on at most `threads` - 1 threads of the pool. The caller computes
// every part that no thread has claimed, so a pool whose threads are all busy causes no deadlock.
template <class ThreadPool, class F>
void parallel(ThreadPool& pool, int64_t n, int64_t threads, F f) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  WithoutDenormals here;
  int64_t helpers = std::min({threads, n, int64_t(pool.num_threads())}) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < n; i++) f(i);
    return;
  }
  auto shared = std::make_shared<Shared>();  // a helper may begin after the caller has returned
  auto work = [shared, n, f] {
    WithoutDenormals there;
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      f(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t t = 0; t < helpers; t++) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < n; spins++)
    if (spins < SPINS) _mm_pause();
    else std::this_thread::yield();
}
