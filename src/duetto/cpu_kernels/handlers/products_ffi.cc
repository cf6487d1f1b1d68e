// Handlers of products for XLA, one for each instruction set.
#include "pool.h"
#include "../products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int64_t LEAST_BYTES = 1 << 16, LEAST_SUMS = 1 << 20;  // of a part: less takes longer to hand over
constexpr int64_t PARTS = 16;                                  // for each thread: they may be interrupted

static ffi::Error product(const Products& kernels, ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                          ffi::Result<ffi::AnyBuffer> y) {
  auto from = x.dimensions(), to = y->dimensions(), packed = w.dimensions();
  bool is_bf16 = w.element_type() == ffi::DataType::BF16;
  if (from.size() == 0 || to.size() != from.size() || packed.size() != (is_bf16 ? 4 : 3) || x.element_type() != w.element_type())
    return ffi::Error::InvalidArgument("a product of other arrays than it is compiled for");
  int64_t K = from[from.size() - 1], N = to[to.size() - 1], M = y->element_count() / std::max<int64_t>(N, 1);
  Product p{x.untyped_data(), w.untyped_data(), y->untyped_data(), M, N, K, y->element_type() == ffi::DataType::BF16};
  if (packed[0] != p.panels() || packed[1] != (is_bf16 ? (K + 1) / 2 : K) || int64_t(x.element_count()) != M * K)
    return ffi::Error::InvalidArgument("a product of other shapes than it is compiled for");
  int64_t bytes = w.size_bytes() / std::max<int64_t>(p.panels(), 1), sums = M * K * COLS;
  int64_t least = std::min(LEAST_BYTES / std::max<int64_t>(bytes, 1), LEAST_SUMS / std::max<int64_t>(sums, 1)) + 1;
  int64_t parts = std::clamp<int64_t>(p.panels() / least, 1, PARTS * std::max<int64_t>(pool.num_threads(), 1));
  Panels panels = is_bf16 ? kernels.bf16 : kernels.f32;
  parallel(pool, parts, parts, [=](int64_t i) { panels(p, p.panels() * i / parts, p.panels() * (i + 1) / parts); });
  return ffi::Error::Success();
}

#define HANDLER(isa)                                                                                              \
  static ffi::Error product_##isa(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,                       \
                                  ffi::Result<ffi::AnyBuffer> y) {                                                \
    return product(isa::products, pool, x, w, y);                                                                 \
  }                                                                                                               \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(EXPORTED(product_##isa), product_##isa,                                            \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>() \
                                    .Ret<ffi::AnyBuffer>());
FOR_EACH_ISA(HANDLER)

// Whether this processor has the instruction sets that the kernels of a name are compiled for.
extern "C" __attribute__((visibility("default"))) int EXPORTED(supports_avx2)() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
extern "C" __attribute__((visibility("default"))) int EXPORTED(supports_avx512)() {
  return EXPORTED(supports_avx2)() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
extern "C" __attribute__((visibility("default"))) int EXPORTED(supports_avx512_bf16)() {
  return EXPORTED(supports_avx512)() && __builtin_cpu_supports("avx512bf16");
}
