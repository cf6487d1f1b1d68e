// Norms of rows: each row over the root of its mean square, or over its deviation, times a gain.
#pragma once
#include "isa/isa.h"

struct Norm {
  const void *x, *gain, *bias;  // [rows,D], [groups,D] or null, the same: row r has those of r % groups
  void* y;                      // [rows,D]; all are floats, or bfloat16
  int64_t rows, D, groups;
  float eps, offset;  // that of the gain
  bool is_layer;      // the mean is subtracted first
};

// Computes the rows [first,last). A row's sum runs over its vectors in order, whatever the rows beside it.
using NormRows = void (*)(const Norm&, int64_t first, int64_t last);

struct Norms {
  NormRows bf16, f32;
};

#define DECLARE(isa) namespace isa { extern const Norms norms; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
