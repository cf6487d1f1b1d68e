// Rotary embedding of new queries and keys, and the writes of keys and values into their pages.
#pragma once
#include "isa.h"

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

#define DECLARE(isa) namespace isa { extern const Turns turns; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
