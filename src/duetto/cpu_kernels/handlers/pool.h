// Work in parts on XLA's threads.
#pragma once
#if !defined(__aarch64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

constexpr int SPINS = 4000;                 // some 50 us, before a waiting thread yields its core
constexpr int64_t LEAST_NUMBERS = 1 << 15;  // of a part: fewer take longer to hand over

// What a processor has for a thread's floats, and for a thread that waits.
#if defined(__aarch64__)
constexpr uint64_t DENORMALS_ARE_ZEROS = 1 << 24;
inline uint64_t float_mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
inline void relax() { asm volatile("isb"); }  // `yield` takes no time
#else
constexpr uint64_t DENORMALS_ARE_ZEROS = 0x8040;
inline uint64_t float_mode() { return _mm_getcsr(); }
inline void set_float_mode(uint64_t mode) { _mm_setcsr(uint32_t(mode)); }
inline void relax() { _mm_pause(); }
#endif

// While it lives, denormals count as zero and are written as zero, whatever thread computes.
class WithoutDenormals {
 public:
  WithoutDenormals() : before_(float_mode()) { set_float_mode(before_ | DENORMALS_ARE_ZEROS); }
  ~WithoutDenormals() { set_float_mode(before_); }

 private:
  uint64_t before_;
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
    if (spins < SPINS) relax();
    else std::this_thread::yield();
}
