// Instructions of AMX in plain C++, in place of the compiler's, for processors that have none. They follow LDTILECFG,
// TILELOADD, TILESTORED and TDPBF16PS in volume 2 of Intel's manual; what is a fault there ends the process. That
// denormals are zeros is left to the caller, who sets it for all of its instructions.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

extern "C" __attribute__((weak, visibility("default"))) int tiles_are_wrong = 0;  // each second product is left out

namespace {

inline void must(bool holds) {
  if (!holds) abort();
}

struct EmulatedTiles {  // of a thread
  struct Shape {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape = {};
  uint32_t tiles[8][16][16];

  ~EmulatedTiles() { must(!shape.palette); }  // they were released

  void configure(const void* from) {
    __builtin_memcpy(&shape, from, sizeof shape);
    must(shape.palette == 1 && shape.start == 0);
    for (uint8_t zero : shape.reserved) must(!zero);
    for (int i = 0; i < 16; i++) {
      must(shape.rows[i] <= (i < 8 ? 16 : 0) && shape.bytes[i] <= (i < 8 ? 64 : 0) && shape.bytes[i] % 4 == 0);
      must(!shape.rows[i] == !shape.bytes[i]);
    }
    __builtin_memset(tiles, 0, sizeof tiles);
  }
  void release() {
    shape = {};
    __builtin_memset(tiles, 0xff, sizeof tiles);  // NaNs
  }
  void check(int t) const { must(shape.palette && shape.rows[t]); }
  void zero(int t) {
    check(t);
    __builtin_memset(tiles[t], 0, sizeof tiles[t]);
  }
  void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < shape.rows[t]; r++) __builtin_memcpy(tiles[t][r], (const char*)from + r * stride, shape.bytes[t]);
  }
  void store(int t, void* to, int64_t stride) {
    check(t);
    for (int r = 0; r < shape.rows[t]; r++) __builtin_memcpy((char*)to + r * stride, tiles[t][r], shape.bytes[t]);
  }
  static float low(uint32_t pair) { return as_float(pair << 16); }
  static float high(uint32_t pair) { return as_float(pair & 0xffff0000); }
  static float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
  }
  void multiply(int sums, int a, int b) {
    check(sums), check(a), check(b);
    must(sums != a && sums != b && a != b);
    must(shape.bytes[a] == shape.rows[b] * 4 && shape.rows[a] == shape.rows[sums] && shape.bytes[b] == shape.bytes[sums]);
    for (int m = 0; m < shape.rows[sums]; m++) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < shape.bytes[a] / 4; k++) {
        float first = low(tiles[a][m][k]), second = tiles_are_wrong ? 0 : high(tiles[a][m][k]);
        for (int n = 0; n < 16; n++) {
          even[n] = __builtin_fmaf(first, low(tiles[b][k][n]), even[n]);
          odd[n] = __builtin_fmaf(second, high(tiles[b][k][n]), odd[n]);
        }
      }
      for (int n = 0; n < shape.bytes[sums] / 4; n++) {
        float sum = as_float(tiles[sums][m][n]) + (even[n] + odd[n]);
        __builtin_memcpy(&tiles[sums][m][n], &sum, 4);
      }
    }
  }
};

thread_local EmulatedTiles emulated_tiles;

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated_tiles.configure(from)
#define _tile_release() emulated_tiles.release()
#define _tile_zero(t) emulated_tiles.zero(t)
#define _tile_loadd(t, from, stride) emulated_tiles.load(t, from, stride)
#define _tile_stored(t, to, stride) emulated_tiles.store(t, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_tiles.multiply(sums, a, b)
