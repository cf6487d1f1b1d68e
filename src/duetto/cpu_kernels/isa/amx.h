// Products of bfloat16 by AMX, whose registers hold tiles: up to 16 rows of 64 bytes.
#pragma once
#include "simd.h"

#if defined(__AMX_BF16__)
namespace ISA {
namespace {

// Tiles of a thread, until this is destroyed: 0 to 3 are sums of up to 32 rows by a panel, two for each 16 rows;
// 4 and 5 rows of x, 6 and 7 weights of a panel.
class Tiles {
 public:
  static constexpr bool ARE_TILES = true;
  static constexpr int TALL = 32, ROWS = 256;

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() { _tile_release(); }

  // Adds the products of `inputs` columns of x [rows][K] to sums [rows][32], which begin with 0 if `begins`. All
  // rows take them in the same steps.
  void add(int64_t rows, const uint16_t* x, int64_t K, int64_t inputs, const char* w, float* sums, bool begins) {
    configure(rows);
    complete(w, sums);
#define FOR_EACH_SUM(X) X(0, sums) X(1, sums + 16) if (rows > HEIGHT) { X(2, sums + 512) X(3, sums + 528) }
#define ZERO(tile, at) _tile_zero(tile);
#define LOAD(tile, at) _tile_loadd(tile, at, BYTES);
#define STORE(tile, at) _tile_stored(tile, at, BYTES);
    if (begins) { FOR_EACH_SUM(ZERO) } else { FOR_EACH_SUM(LOAD) }
    int64_t k = 0;
    for (; k + DEPTH <= inputs; k += DEPTH) step((const char*)(x + k), K * 2, w + k / 2 * BYTES);
    if (k < inputs) last_step(x + k, K, inputs - k, w + k / 2 * BYTES);
    FOR_EACH_SUM(STORE)
  }

 private:
  static constexpr int64_t HEIGHT = 16, DEPTH = 32;  // rows and inputs of a tile
  static constexpr int64_t BYTES = 128;              // of a panel's sums of a row, and of its weights of a pair of inputs

  // Gives tiles the heights of so many rows, and sets them to zeros, if the last product had others.
  void configure(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    uint8_t first = rows < HEIGHT ? rows : HEIGHT, second = rows - first, pairs = DEPTH / 2;
    const uint8_t heights[] = {first, first, second, second, first, second, pairs, pairs};
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; i++) {
      shape.rows[i] = heights[i];
      shape.bytes[i] = heights[i] ? 64 : 0;
    }
    complete(&shape, &shape);
    _tile_loadconfig(&shape);
  }

  void step(const char* x, int64_t stride, const char* w) {
    _tile_loadd(6, w, BYTES);
    _tile_loadd(7, w + BYTES / 2, BYTES);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (rows_ <= HEIGHT) return;
    _tile_loadd(5, x + HEIGHT * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // The step of fewer inputs than a tile has: behind them are zeros, in place of another row's and panel's numbers.
  void last_step(const uint16_t* x, int64_t K, int64_t inputs, const char* w) {
    alignas(64) char rows[TALL][DEPTH * 2] = {}, pairs[DEPTH / 2][BYTES] = {};
    for (int64_t r = 0; r < rows_; r++) __builtin_memcpy(rows[r], x + r * K, inputs * 2);
    __builtin_memcpy(pairs, w, (inputs + 1) / 2 * BYTES);
    complete(rows, pairs);
    step(rows[0], DEPTH * 2, pairs[0]);
  }

  // Writes what the compiler holds back: GCC does not know what instructions on tiles read.
  static void complete(const void* a, const void* b) { asm volatile("" ::"r"(a), "r"(b) : "memory"); }

  int64_t rows_ = 0;
};

}  // namespace
}  // namespace ISA
#endif
