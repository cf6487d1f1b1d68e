// Products y[M,N] = x[M,K] w[K,N] over panels of COLS outputs.
#pragma once
#include "isa/isa.h"

// A weight of floats is packed as [panels][K][COLS], one of bfloat16 or of 8-bit codes as
// [panels][pairs of K][COLS][2], one of 4-bit codes as [panels][pairs of K][COLS], a pair's first code in the low
// bits: what the instructions read in turn. The last panel, and the last pair, are filled up with zeros.
constexpr int COLS = 32;

// What the weights are: numbers of x's kind, or codes. A sum over 8-bit codes is multiplied by the scale of its
// output, [panels][COLS] floats. A 4-bit code less 8 is multiplied by the scale of its group of inputs,
// [panels][groups][COLS], and rounded to x's kind.
enum Form { NUMBERS, INT8, INT4, FORMS };

struct Product {
  const void *x, *w, *scales;
  void* y;
  int64_t M, N, K, group;  // group: inputs that share a scale
  bool y_is_bf16, scales_are_bf16;
  Form form;

  int64_t panels() const { return (N + COLS - 1) / COLS; }
};

// Computes y's columns of the panels [first,last). Each number is one sum that begins with 0 and runs along K in
// order, whatever M: a row's bits do not depend on the rows beside it.
using Panels = void (*)(const Product&, int64_t first, int64_t last);

struct Products {
  Panels bf16[FORMS], f32[FORMS];  // by x's kind
};

#define DECLARE(isa) namespace isa { extern const Products products; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
