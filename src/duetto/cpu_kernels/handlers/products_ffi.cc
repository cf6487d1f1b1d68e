// Handlers of products for XLA, one for each instruction set.
#include <cstring>
#include <memory>
#include <vector>

#include "pool.h"
#include "../products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

constexpr int64_t LEAST_BYTES = 1 << 16, LEAST_SUMS = 1 << 20;  // of a part: less takes longer to hand over
constexpr int64_t PARTS = 16;                                  // for each thread: they may be interrupted

using In = ffi::AnyBuffer;

static int64_t last_of(const In& x) { return x.dimensions().size() ? x.dimensions().back() : 0; }

static Form form_of(const In& w) {
  switch (w.element_type()) {
    case ffi::DataType::S8: return w.dimensions().size() && w.dimensions().back() == 4 ? CODES : INT8;
    case ffi::DataType::U8: return w.dimensions().size() && w.dimensions().back() == 4 ? NIBBLES : INT4;
    case ffi::DataType::U16: return BF12;
    default: return NUMBERS;
  }
}

// Panels of a product that one thread multiplies.
struct Part {
  int64_t product, first, last;
};

static int64_t bits_of(Form form, int64_t number_bits) {
  switch (form) {
    case INT8:
    case CODES: return 8;
    case INT4:
    case NIBBLES: return 4;
    case BF12: return 12;
    default: return number_bits;
  }
}

static std::vector<Part> parts_of(const std::vector<Product>& products, int64_t number_bits, int64_t threads) {
  std::vector<Part> parts;
  for (size_t i = 0; i < products.size(); i++) {
    const Product& p = products[i];
    int64_t panels = p.panels(), sums = p.M * p.K * COLS;
    int64_t bytes = p.K * COLS * bits_of(p.form, number_bits) / 8;  // of a panel
    int64_t least = std::min(LEAST_BYTES / std::max<int64_t>(bytes, 1), LEAST_SUMS / std::max<int64_t>(sums, 1)) + 1;
    int64_t n = std::clamp<int64_t>(panels / least, 1, PARTS * std::max<int64_t>(threads, 1));
    for (int64_t j = 0; j < n; j++) parts.push_back({int64_t(i), panels * j / n, panels * (j + 1) / n});
  }
  return parts;
}

// Adds the products of each weight that has rows: sizes[e] consecutive rows have that of number e. Rows behind them
// all become zeros.
static void add_ragged(const Product& all, const In& sizes, int64_t x_bytes, int64_t w_bytes, int64_t scale_bytes,
                       std::vector<Product>& products) {
  int64_t row = 0, y_bytes = all.y_is_bf16 ? 2 : 4;
  for (int64_t e = 0; e < int64_t(sizes.element_count()); e++) {
    Product p = all;
    p.M = std::clamp<int64_t>(((const int32_t*)sizes.untyped_data())[e], 0, all.M - row);
    p.x = (const char*)all.x + row * all.K * x_bytes;
    p.y = (char*)all.y + row * all.N * y_bytes;
    p.w = (const char*)all.w + e * w_bytes;
    p.scales = (const char*)all.scales + e * scale_bytes;
    if (p.M) products.push_back(p);
    row += p.M;
  }
  std::memset((char*)all.y + row * all.N * y_bytes, 0, (all.M - row) * all.N * y_bytes);
}

// Adds the product of x [...,K] with a packed weight, with scales [panels,groups,COLS] of codes, of no elements
// otherwise. With sizes [E] both have E before their axes, otherwise sizes has no elements. A weight in 12 bits has a
// pair of inputs more, of Exponents. With sizes, rows in codes are of 8-bit codes.
static ffi::Error add_products(const In& x, const In& sizes, const In& w, const In& scales, const In& y,
                               std::vector<Product>& products) {
  using ffi::DataType;
  bool is_bf16 = x.element_type() == DataType::BF16, is_ragged = sizes.element_count() > 0;
  auto packed = w.dimensions(), scaled = scales.dimensions();
  Form form = form_of(w);
  bool has_column_scales = form == INT8 || form == CODES, has_groups = form == INT4 || form == NIBBLES, are_codes = has_column_scales || has_groups;
  size_t axes = is_ragged + (has_column_scales || form == NIBBLES || (form != INT4 && is_bf16) ? 4 : 3);
  if ((!is_bf16 && (x.element_type() != DataType::F32 || form == BF12)) || (form == NIBBLES && is_ragged) || (form == NUMBERS && w.element_type() != x.element_type()) ||
      packed.size() != axes || scaled.size() != size_t(3 + (are_codes && is_ragged)))
    return ffi::Error::InvalidArgument("a product of other arrays than it is compiled for");
  int64_t K = last_of(x), N = last_of(y), M = y.element_count() / std::max<int64_t>(N, 1), E = is_ragged ? packed[0] : 1;
  int64_t groups = are_codes ? scaled[1 + is_ragged] : 1, group = K / std::max<int64_t>(groups, 1);
  Product p{x.untyped_data(), w.untyped_data(), scales.untyped_data(), y.untyped_data(), M, N, K, group,
            y.element_type() == DataType::BF16, scales.element_type() == DataType::BF16, form};
  int64_t depth = form == CODES ? (K + 3) / 4 : form == NIBBLES ? K / 8 : are_codes || is_bf16 ? (K + 1) / 2 : K, scale_count = p.panels() * groups * COLS;
  if (form == BF12) p.scales = (const char*)p.w + p.panels() * depth * COLS * 4;
  if (packed[is_ragged] != p.panels() || packed[is_ragged + 1] != depth + (form == BF12) || int64_t(x.element_count()) != M * K ||
      (is_ragged && int64_t(sizes.element_count()) != E) || (has_column_scales && groups != 1) || (has_groups && group % (form == INT4 ? 2 : 8)) || (form == NIBBLES && group > LONGEST_GROUP) ||
      (are_codes && (int64_t(scales.element_count()) != E * scale_count || group * groups != K)))
    return ffi::Error::InvalidArgument("a product of other shapes than it is compiled for");
  int64_t w_bytes = w.size_bytes() / std::max<int64_t>(E, 1);
  int64_t scale_bytes = form == BF12 ? w_bytes : scales.size_bytes() / std::max<int64_t>(E, 1);
  if (!is_ragged) products.push_back(p);
  else add_ragged(p, sizes, is_bf16 ? 2 : 4, w_bytes, scale_bytes, products);
  return ffi::Error::Success();
}

// Rows of x in codes, which the products of a call share. A product may have some of the rows. `starts` are of products
// of NIBBLES, one of each size of units; these have all rows.
struct Coded {
  std::unique_ptr<int8_t[]> codes;
  std::unique_ptr<CodedRow[]> rows;
  std::vector<std::unique_ptr<uint32_t[]>> starts;
};

// The longest part of a group, in eights, whose sums a kernel has room for.
static int64_t unit_of(int64_t group, int64_t longest) {
  int64_t parts = std::max<int64_t>((group + longest - 1) / longest, 1);
  while (group % (8 * parts)) parts++;
  return group / parts;
}

// Gives a product of NIBBLES its unit, and the starts of one before it with the same, or new ones.
static void share_starts(Product& p, int64_t longest, std::vector<Product>& units, Coded& made) {
  p.unit = unit_of(p.group, longest);
  auto same = std::find_if(units.begin(), units.end(), [&](const Product& other) { return other.unit == p.unit; });
  if (same != units.end()) {
    p.starts = same->starts;
    return;
  }
  made.starts.emplace_back(new uint32_t[p.M * (p.K / p.unit)]);
  p.starts = made.starts.back().get();
  units.push_back(p);
}

static Coded code_rows(const Products& kernels, ffi::ThreadPool& pool, const In& x, std::vector<Product>& products) {
  auto first = std::find_if(products.begin(), products.end(), [](const Product& p) { return has_coded_rows(p.form); });
  if (first == products.end()) return {};
  int64_t M = 0, row_bytes = std::max<int64_t>(first->K, 1) * (x.element_type() == ffi::DataType::BF16 ? 2 : 4);
  auto row_of = [&](const Product& p) { return ((const char*)p.x - (const char*)x.untyped_data()) / row_bytes; };
  for (const Product& p : products)
    if (has_coded_rows(p.form)) M = std::max(M, row_of(p) + p.M);
  RowCoding coding{x.untyped_data(), first->K, nullptr, nullptr};
  Coded made{std::unique_ptr<int8_t[]>(new int8_t[M * coding.width()]), std::unique_ptr<CodedRow[]>(new CodedRow[M]), {}};
  coding.codes = made.codes.get();
  coding.rows = made.rows.get();
  std::vector<Product> units;  // one of each size
  for (Product& p : products) {
    if (!has_coded_rows(p.form)) continue;
    int64_t row = row_of(p);
    p.x = coding.codes + row * coding.width();
    p.rows = coding.rows + row;
    p.K = coding.width();
    if (p.form == CODES) p.group = p.K;
    else share_starts(p, kernels.longest_unit, units, made);
  }
  CodeRows code = x.element_type() == ffi::DataType::BF16 ? kernels.code_bf16 : kernels.code_f32;
  int64_t parts = std::clamp<int64_t>(M * coding.K / LEAST_NUMBERS, 1, std::max<int64_t>(M, 1));
  parallel(pool, parts, parts, [&](int64_t i) {
    int64_t from = M * i / parts, to = M * (i + 1) / parts;
    code(coding, from, to);
    for (const Product& p : units) {
      int64_t each = p.K / p.unit;
      kernels.start_units(coding.codes + from * p.K, (to - from) * each, p.unit, (uint32_t*)p.starts + from * each);
    }
  });
  return made;
}

// Products of x with several weights, each of which has its scales behind it.
static ffi::Error product(const Products& kernels, ffi::ThreadPool& pool, In x, In sizes, ffi::RemainingArgs weights,
                          ffi::RemainingRets made) {
  std::vector<Product> products;
  for (size_t i = 0; i < made.size(); i++) {
    auto w = weights.get<In>(2 * i), scales = weights.get<In>(2 * i + 1);
    auto y = made.get<In>(i);
    if (!w || !scales || !y) return ffi::Error::InvalidArgument("products of other arrays than they are compiled for");
    if (ffi::Error error = add_products(x, sizes, *w, *scales, **y, products); error.failure()) return error;
  }
  for (Product& p : products) {
    if (p.form != BF12) continue;
    if (!kernels.bf16[BF12]) return ffi::Error::InvalidArgument("a product in 12 bits, which these kernels do not have");
    if (((const Exponents*)p.scales)->before < 0) p.form = NUMBERS;
  }
  Coded coded = code_rows(kernels, pool, x, products);
  bool is_bf16 = x.element_type() == ffi::DataType::BF16;
  std::vector<Part> parts = parts_of(products, is_bf16 ? 16 : 32, pool.num_threads());
  const Panels* panels = is_bf16 ? kernels.bf16 : kernels.f32;
  parallel(pool, parts.size(), parts.size(), [&](int64_t i) {
    const Product& p = products[parts[i].product];
    panels[p.form](p, parts[i].first, parts[i].last);
  });
  return ffi::Error::Success();
}

// Whether sums of codes are right, of 8 bits and of 4 in groups. They are the same on every processor.
static bool are_codes_right(const Products& kernels) {
  constexpr int64_t M = 13, N = 35, K = 71, WIDTH = 72, GROUP = 24, UNITS = WIDTH / GROUP;
  float x[M * K], scales[2 * UNITS * COLS], y[M * N];
  int8_t w[2 * WIDTH * COLS] = {}, codes[M * WIDTH];
  uint8_t nibbles[2 * WIDTH * COLS / 2] = {};
  uint32_t starts[M * UNITS];
  CodedRow rows[M];
  auto code = [](int64_t i) { return int8_t(i % 71 ? i * i * 3 % 255 - 127 : -127); };  // each row has a largest one
  for (int64_t i = 0; i < M * K; i++) x[i] = code(i);
  for (float& scale : scales) scale = 1;
  for (int64_t i = 0; i < N * K; i++) w[((i / K / COLS * WIDTH + i % K / 4 * 4) * COLS) + i / K % COLS * 4 + i % K % 4] = int8_t(5 * i - 128);
  for (int64_t i = 0; i < N * WIDTH; i++) nibbles[(i / WIDTH / COLS * (WIDTH / 8) + i % WIDTH / 8) * COLS * 4 + i / WIDTH % COLS * 4 + i % 4] |= (7 * i % 16) << (i % 8 / 4 * 4);
  kernels.code_f32({x, K, codes, rows}, 0, M);
  kernels.start_units(codes, M * UNITS, GROUP, starts);
  auto are_right = [&](const void* weights, Form form, auto weight) {
    kernels.f32[form]({codes, weights, scales, y, M, N, WIDTH, form == CODES ? WIDTH : GROUP, false, false, form, rows, GROUP, starts}, 0, 2);
    for (int64_t i = 0; i < M * N; i++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < K; k++) sum += code(i / N * K + k) * weight(i % N, k);
      if (y[i] != float(sum) * (127 * (1.0f / 127))) return false;
    }
    return true;
  };
  return are_right(w, CODES, [](int64_t n, int64_t k) { return int8_t(5 * (n * K + k) - 128); }) &&
         are_right(nibbles, NIBBLES, [](int64_t n, int64_t k) { return 7 * (n * WIDTH + k) % 16 - 8; });
}

// Whether products of small numbers, which no order of sums rounds, are right.
static bool is_right(const Products& kernels) {
  constexpr int64_t M = 19, N = 35, K = 71, PAIRS = 36;  // no multiples of what kernels take at once
  uint16_t x[M * K], w[2 * PAIRS * COLS * 2] = {};
  float y[M * N];
  auto number = [](int64_t i) { return float(i * i % 11 - 5); };
  auto put = [](float number, uint16_t& to) { std::memcpy(&to, (const char*)&number + 2, 2); };  // as bfloat16
  for (int64_t i = 0; i < M * K; i++) put(number(i), x[i]);
  for (int64_t i = 0; i < N * K; i++) put(number(7 * i), w[((i / K / COLS * PAIRS + i % K / 2) * COLS + i / K % COLS) * 2 + i % K % 2]);
  kernels.bf16[NUMBERS]({x, w, nullptr, y, M, N, K, K, false, false, NUMBERS}, 0, 2);
  for (int64_t i = 0; i < M * N; i++) {
    for (int64_t k = 0; k < K; k++) y[i] -= number(i / N * K + k) * number(7 * (i % N * K + k));
    if (y[i] != 0) return false;
  }
  return are_codes_right(kernels);
}

#define HANDLER(isa)                                                                                               \
  static ffi::Error product_##isa(ffi::ThreadPool pool, In x, In sizes, ffi::RemainingArgs weights,                \
                                  ffi::RemainingRets made) {                                                       \
    return product(isa::products, pool, x, sizes, weights, made);                                                  \
  }                                                                                                                \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(EXPORTED(product_##isa), product_##isa,                                            \
                                ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<In>().Arg<In>().RemainingArgs().RemainingRets()); \
  extern "C" __attribute__((visibility("default"))) int EXPORTED(is_right_##isa)() { return is_right(isa::products); }
FOR_EACH_ISA(HANDLER)
#undef HANDLER
