// New tokens' heads: their rotary embedding and the writes into pages, and attention over pages of keys and values.
#pragma once
#include "isa/isa.h"

#define INLINE inline __attribute__((always_inline))  // no copy that an instruction set without it could run

constexpr int PART = 256;       // keys whose sums are complete before they are added to those of the keys before
constexpr int BLOCK = 64;       // keys of one product
constexpr int MOST_ROWS = 64;   // queries of a tile
constexpr int MOST_SIZE = 256;  // numbers of a head, a multiple of 16
constexpr float UNSEEN = -1e30f;

// All of a layer's call. Bytes of heads are floats, or bfloat16.
struct Attention {
  const char *q, *k, *v;                 // [B,T,K,G,H], pools [K,P,W,H]
  const int32_t *table, *start, *count;  // [B,M], [B], [B]
  const float* sinks;                    // [K,G] or null
  const char *own_k, *own_v;             // [B,path,K,H], in place of a row's keys from position root on
  const int32_t* root;                   // [B] or null
  char* out;                             // [B,T,K,G,H]
  int64_t B, T, K, G, H, P, W, M, path;
  float scale, softcap;  // softcap 0 is none
  int64_t window;        // 0 is none
  bool chunked, is_bf16;

  INLINE int64_t bytes() const { return H * (is_bf16 ? 2 : 4); }
  // The first key that the query at a position sees.
  INLINE int64_t low(int64_t position) const {
    int64_t first = !window ? 0 : chunked ? position - position % window : position - (window - 1);
    return first > 0 ? first : 0;
  }
};

// Queries [first, first+rows) of the count*G ones of a row of the batch, and of the rows that go on with it, and a key
// head; they see keys in [low,end).
struct Tile {
  int64_t row, head, first, rows, low, end;

  INLINE int64_t first_part() const { return low / PART; }
  INLINE int64_t parts() const { return (end + PART - 1) / PART - first_part(); }
};

// The running softmax of each query of a tile: its highest score, its total, and the sums of its values.
struct Running {
  float *top, *total, *sums;  // [rows], [rows], [rows,H]

  INLINE Running(float* at, int64_t rows) : top(at), total(at + rows), sums(at + 2 * rows) {}
  static INLINE int64_t size(int64_t rows, int64_t H) { return rows * (H + 2); }
};

// A thread's own memory.
struct Workspace {
  alignas(64) uint32_t q[MOST_ROWS * MOST_SIZE];
  alignas(64) uint32_t k[MOST_SIZE * BLOCK];
  alignas(64) uint32_t v[BLOCK * MOST_SIZE];
  alignas(64) float running[2][MOST_ROWS * (MOST_SIZE + 2)];
};

// `begin` sets a softmax to nothing, or the sinks; `part` computes that of a part's keys alone, and fetches what comes
// next, of the tile or of the `next` one, which may be null; `add` adds it to that of the keys before; `finish` writes
// the quotients. A query's sums run over its own keys in order, whichever queries share its tile: keys that it does not
// see change no bit of them.
struct AttentionKernels {
  void (*begin)(const Attention&, const Tile&, Running);
  void (*part)(const Attention&, const Tile&, int64_t part, const Tile* next, Workspace&, Running);
  void (*add)(const Attention&, const Tile&, Running, const Running part);
  void (*finish)(const Attention&, const Tile&, const Running);
};

// New queries and keys to turn, and the places of keys and values in their pools.
struct Turn {
  const char *q, *k, *v;         // [rows,N,H], [rows,K,H], the same: floats, or bfloat16
  const float *cos, *sin;        // [rows,pairs]
  const int32_t *page, *offset;  // [rows]: places in the pools; a page that these do not have drops the token
  char *out, *keys, *values;     // queries [rows,N,H], pools [K,P,W,H]
  int64_t rows, N, K, H, P, W, pairs;
};

// Computes the rows [first,last). Pairs are (i, i + pairs); numbers behind them stay.
using TurnRows = void (*)(const Turn&, int64_t first, int64_t last);

struct Turns {
  TurnRows bf16, f32;
};

#define DECLARE(isa) namespace isa { extern const AttentionKernels attention; extern const Turns turns; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
