// Products y[M,N] = x[M,K] w[K,N] over panels of COLS outputs.
#pragma once
#include "isa.h"

// A weight of floats is packed as [panels][K][COLS], one of bfloat16 as [panels][pairs of K][COLS][2]: what the
// instructions read in turn. The last panel, and the last pair, are filled up with zeros.
constexpr int COLS = 32;

struct Product {
  const void* x;
  const void* w;
  void* y;
  int64_t M, N, K;
  bool y_is_bf16;

  int64_t panels() const { return (N + COLS - 1) / COLS; }
};

// Computes y's columns of the panels [first,last). Each number is one sum that begins with 0 and runs along K in
// order, whatever M: a row's bits do not depend on the rows beside it.
using Panels = void (*)(const Product&, int64_t first, int64_t last);

struct Products {
  Panels bf16, f32;
};

#define DECLARE(isa) namespace isa { extern const Products products; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
