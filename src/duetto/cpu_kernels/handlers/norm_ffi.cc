// Handlers of norms for XLA, one for each instruction set.
#include "../norm.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;

// x [...,D] with a gain and a bias of groups of D numbers, which have no elements where there is none.
static ffi::Error norm(const Norms& kernels, ffi::ThreadPool& pool, In x, In gain, In bias, int64_t D, float eps,
                       float offset, bool is_layer, ffi::Result<In> y) {
  auto like = [&](In& w) { return w.element_count() == gain.element_count() && w.element_type() == x.element_type(); };
  int64_t numbers = x.element_count(), gains = gain.element_count();
  bool is_bf16 = x.element_type() == ffi::DataType::BF16, is_f32 = x.element_type() == ffi::DataType::F32;
  if (D < 1 || numbers % D || gains % D || !(is_bf16 || is_f32) || y->element_type() != x.element_type() ||
      int64_t(y->element_count()) != numbers || (gains && !like(gain)) || (bias.element_count() && !like(bias)))
    return ffi::Error::InvalidArgument("a norm of other arrays than it is compiled for");
  Norm a{x.untyped_data(), gains ? gain.untyped_data() : nullptr, bias.element_count() ? bias.untyped_data() : nullptr,
         y->untyped_data(), numbers / D, D, std::max<int64_t>(gains / D, 1), eps, offset, is_layer};
  int64_t parts = std::clamp<int64_t>(numbers / LEAST_NUMBERS, 1, std::max<int64_t>(a.rows, 1));
  NormRows rows = is_bf16 ? kernels.bf16 : kernels.f32;
  parallel(pool, parts, parts, [=](int64_t i) { rows(a, a.rows * i / parts, a.rows * (i + 1) / parts); });
  return ffi::Error::Success();
}

#define HANDLER(isa)                                                                                                \
  static ffi::Error norm_##isa(ffi::ThreadPool pool, In x, In gain, In bias, int64_t D, float eps, float offset,    \
                               bool is_layer, ffi::Result<In> y) {                                                  \
    return norm(isa::norms, pool, x, gain, bias, D, eps, offset, is_layer, y);                                      \
  }                                                                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(EXPORTED(norm_##isa), norm_##isa,                                                    \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<In>().Arg<In>().Arg<In>()               \
                                    .Attr<int64_t>("D").Attr<float>("eps").Attr<float>("offset")                    \
                                    .Attr<bool>("is_layer").Ret<In>());
FOR_EACH_ISA(HANDLER)
#undef HANDLER
