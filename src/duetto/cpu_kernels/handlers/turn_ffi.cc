// Handlers of rotary embedding and of writes into pages for XLA, one for each instruction set.
#include "../attention.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<In>;

// q [B,T,N,H], k and v [B,T,K,H], with a rotation [B,T,1,pairs] and places [B,T] in pools [K,P,W,H], which are the
// results' own arrays.
static ffi::Error turn(const Turns& kernels, ffi::ThreadPool& pool, In q, In k, In v, In cos, In sin, In page,
                       In offset, In keys, In values, Out out, Out new_keys, Out new_values) {
  auto of = q.dimensions(), pages = keys.dimensions(), angles = cos.dimensions();
  if (of.size() != 4 || pages.size() != 4 || angles.size() != 4)
    return ffi::Error::InvalidArgument("a turn of other arrays than it is compiled for");
  bool is_bf16 = q.element_type() == ffi::DataType::BF16;
  Turn a{(const char*)q.untyped_data(), (const char*)k.untyped_data(), (const char*)v.untyped_data(),
         (const float*)cos.untyped_data(), (const float*)sin.untyped_data(), (const int32_t*)page.untyped_data(),
         (const int32_t*)offset.untyped_data(), (char*)out->untyped_data(), (char*)new_keys->untyped_data(),
         (char*)new_values->untyped_data(), of[0] * of[1], of[2], pages[0], of[3], pages[1], pages[2], angles[3]};
  int64_t head = a.H * (is_bf16 ? 2 : 4), places = a.rows * 4, kept = a.K * a.P * a.W * head, turned = a.pairs * places;
  auto has = [](In& x, int64_t bytes) { return int64_t(x.size_bytes()) == bytes; };
  if ((!is_bf16 && q.element_type() != ffi::DataType::F32) || pages[3] != a.H || 2 * a.pairs > a.H ||
      !has(q, a.rows * a.N * head) || !has(k, a.rows * a.K * head) || !has(v, a.rows * a.K * head) ||
      !has(cos, turned) || !has(sin, turned) || !has(page, places) || !has(offset, places) || !has(keys, kept) ||
      !has(values, kept) || a.keys != keys.untyped_data() || a.values != values.untyped_data())
    return ffi::Error::InvalidArgument("a turn of other shapes than it is compiled for");
  int64_t parts = std::clamp<int64_t>(a.rows * (a.N + 2 * a.K) * a.H / LEAST_NUMBERS, 1, std::max<int64_t>(a.rows, 1));
  TurnRows rows = is_bf16 ? kernels.bf16 : kernels.f32;
  parallel(pool, parts, parts, [=](int64_t i) { rows(a, a.rows * i / parts, a.rows * (i + 1) / parts); });
  return ffi::Error::Success();
}

#define HANDLER(isa)                                                                                                \
  static ffi::Error turn_##isa(ffi::ThreadPool pool, In q, In k, In v, In cos, In sin, In page, In offset, In keys, \
                               In values, Out out, Out new_keys, Out new_values) {                                  \
    return turn(isa::turns, pool, q, k, v, cos, sin, page, offset, keys, values, out, new_keys, new_values);        \
  }                                                                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(EXPORTED(turn_##isa), turn_##isa,                                                    \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()     \
                                    .Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Ret<In>().Ret<In>()          \
                                    .Ret<In>());
FOR_EACH_ISA(HANDLER)
#undef HANDLER
