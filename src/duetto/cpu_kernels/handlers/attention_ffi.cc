// Handlers of attention for XLA, one for each instruction set.
#include <cstring>
#include <vector>

#include "../attention.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int64_t TILES = 4;            // for each thread; where there are fewer, parts of keys go to threads
constexpr int64_t LEAST_WORK = 1 << 17;  // numbers of keys times queries for a thread: less takes longer to hand over

// True if row b goes on with the sequence of the row before it, which is full.
static bool goes_on(const Attention& a, int64_t b) {
  return b < a.B && !a.root && a.count[b - 1] == a.T && a.count[b] > 0 && a.start[b] == a.start[b - 1] + a.T &&
         !std::memcmp(a.table + b * a.M, a.table + (b - 1) * a.M, a.M * sizeof(int32_t));
}

// The tiles of all rows; those of rows that go on with one another are filled across them. What stands behind a row's
// real tokens becomes zeros.
static std::vector<Tile> tiles_of(const Attention& a) {
  std::vector<Tile> tiles;
  int64_t most = a.G < MOST_ROWS ? MOST_ROWS / a.G * a.G : MOST_ROWS, token = a.K * a.G * a.bytes();
  auto tokens = [&](int64_t b) { return std::clamp<int64_t>(a.count[b], 0, a.T); };
  for (int64_t b = 0; b < a.B; b++)
    std::memset(a.out + (b * a.T + tokens(b)) * token, 0, (a.T - tokens(b)) * token);
  for (int64_t b = 0, next; b < a.B; b = next) {
    int64_t count = tokens(b), start = a.start[b];
    for (next = b + 1; goes_on(a, next); next++) count += tokens(next);
    for (int64_t first = (count * a.G - 1) / most * most; count && first >= 0; first -= most) {  // the longest first
      int64_t rows = std::min(most, count * a.G - first);
      int64_t low = a.low(start + first / a.G), end = start + (first + rows - 1) / a.G + 1;
      for (int64_t h = 0; h < a.K; h++) tiles.push_back({b, h, first, rows, low, end});
    }
  }
  return tiles;
}

static Workspace& workspace() {
  static thread_local Workspace own;
  return own;
}

// Each tile on one thread.
static void by_tiles(const AttentionKernels& kernels, ffi::ThreadPool& pool, const Attention& a,
                     const std::vector<Tile>& tiles, int64_t threads) {
  parallel(pool, tiles.size(), threads, [&](int64_t i) {
    const Tile& t = tiles[i];
    const Tile* next = i + threads < int64_t(tiles.size()) ? &tiles[i + threads] : nullptr;
    Workspace& own = workspace();
    Running all(own.running[0], t.rows), part(own.running[1], t.rows);
    kernels.begin(a, t, all);
    for (int64_t p = 0; p < t.parts(); p++) {
      kernels.part(a, t, t.first_part() + p, next, own, part);
      kernels.add(a, t, all, part);
    }
    kernels.finish(a, t, all);
  });
}

// The parts of each tile on several threads; the same sums in the same order.
static void by_parts(const AttentionKernels& kernels, ffi::ThreadPool& pool, const Attention& a,
                     const std::vector<Tile>& tiles, int64_t threads) {
  struct Part { int64_t tile, number, at; };
  std::vector<Part> parts;
  int64_t size = 0;
  for (size_t i = 0; i < tiles.size(); i++)
    for (int64_t p = 0; p < tiles[i].parts(); p++, size += Running::size(tiles[i].rows, a.H))
      parts.push_back({int64_t(i), tiles[i].first_part() + p, size});
  std::unique_ptr<float[]> found(new float[size]);
  parallel(pool, parts.size(), threads, [&](int64_t i) {
    const Tile& t = tiles[parts[i].tile];
    kernels.part(a, t, parts[i].number, nullptr, workspace(), Running(found.get() + parts[i].at, t.rows));
  });
  WithoutDenormals here;
  for (size_t i = 0, p = 0; i < tiles.size(); i++) {
    const Tile& t = tiles[i];
    Running all(workspace().running[0], t.rows);
    kernels.begin(a, t, all);
    for (int64_t n = 0; n < t.parts(); n++, p++) kernels.add(a, t, all, Running(found.get() + parts[p].at, t.rows));
    kernels.finish(a, t, all);
  }
}

using In = ffi::AnyBuffer;
template <class T = char>
static const T* data(In& x) {
  return x.element_count() ? (const T*)x.untyped_data() : nullptr;
}

// q [B,T,K,G,H] over pools [K,P,W,H]; sinks [K,G] and keys of the row's own [B,path,K,H] with their root [B] have
// no elements where there are none.
static ffi::Error attention(const AttentionKernels& kernels, ffi::ThreadPool& pool, In q, In k, In v, In table,
                            In start, In count, In sinks, In own_k, In own_v, In root, float scale, float softcap,
                            int64_t window, bool chunked, ffi::Result<In> out) {
  auto of = q.dimensions(), pages = k.dimensions(), rows = table.dimensions(), own = own_k.dimensions();
  if (of.size() != 5 || pages.size() != 4 || rows.size() != 2 || own.size() != 4)
    return ffi::Error::InvalidArgument("attention over other arrays than it is compiled for");
  bool is_bf16 = q.element_type() == ffi::DataType::BF16;
  Attention a{data(q), data(k), data(v), data<int32_t>(table), data<int32_t>(start), data<int32_t>(count),
              data<float>(sinks), data(own_k), data(own_v), data<int32_t>(root), (char*)out->untyped_data(),
              of[0], of[1], of[2], of[3], of[4], pages[1], pages[2], rows[1], own[1],
              scale, softcap, window, chunked, is_bf16};
  auto has = [](In& x, int64_t bytes) { return int64_t(x.size_bytes()) == bytes; };
  int64_t kept = a.K * a.P * a.W * a.bytes(), path = a.root ? a.B * a.path * a.K * a.bytes() : 0;
  if (pages[0] != a.K || pages[3] != a.H || a.H % 16 || a.H > MOST_SIZE || rows[0] != a.B ||
      (!is_bf16 && q.element_type() != ffi::DataType::F32) || !has(k, kept) || !has(v, kept) || !has(start, a.B * 4) ||
      !has(count, a.B * 4) || (a.sinks && !has(sinks, a.K * a.G * 4)) || (a.root && (a.path < 1 || !has(root, a.B * 4))) ||
      !has(own_k, path) || !has(own_v, path))
    return ffi::Error::InvalidArgument("attention over other shapes than it is compiled for");
  std::vector<Tile> tiles = tiles_of(a);
  int64_t work = 0;
  for (const Tile& t : tiles) work += t.rows * (t.end - t.low) * a.H;
  int64_t threads = std::clamp<int64_t>(work / LEAST_WORK, 1, std::max<int64_t>(pool.num_threads(), 1));
  bool many = threads == 1 || int64_t(tiles.size()) >= TILES * threads;
  (many ? by_tiles : by_parts)(kernels, pool, a, tiles, threads);
  return ffi::Error::Success();
}

#define HANDLER(isa)                                                                                                \
  static ffi::Error attention_##isa(ffi::ThreadPool pool, In q, In k, In v, In table, In start, In count, In sinks, \
                                    In own_k, In own_v, In root, float scale, float softcap, int64_t window,        \
                                    bool chunked, ffi::Result<In> out) {                                            \
    return attention(isa::attention, pool, q, k, v, table, start, count, sinks, own_k, own_v, root, scale, softcap, \
                     window, chunked, out);                                                                         \
  }                                                                                                                 \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(EXPORTED(attention_##isa), attention_##isa,                                          \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()     \
                                    .Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>().Arg<In>()                    \
                                    .Attr<float>("scale").Attr<float>("softcap").Attr<int64_t>("window")            \
                                    .Attr<bool>("chunked").Ret<In>());
FOR_EACH_ISA(HANDLER)
#undef HANDLER
