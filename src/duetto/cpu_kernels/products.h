// Products y[M,N] = x[M,K] w[K,N] over panels of COLS outputs.
#pragma once
#include "isa/isa.h"

// A weight of floats is packed as [panels][K][COLS], one of bfloat16 or of 8-bit codes as
// [panels][pairs of K][COLS][2], one of 4-bit codes as [panels][pairs of K][COLS], a pair's first code in the low
// bits, one of CODES as [panels][fours of K][COLS][4], one of NIBBLES as [panels][eights of K][COLS][4], the codes of the
// first four inputs in the low bits: what the instructions read in turn. The last panel, and the last pair or four, are
// filled up with zeros.
constexpr int COLS = 32;

// What the weights are: numbers of x's kind, or codes. A sum over 8-bit codes is multiplied by the scale of its
// output, [panels][COLS] floats. A 4-bit code less 8 is multiplied by the scale of its group of inputs,
// [panels][groups][COLS], and rounded to x's kind. BF12 are numbers of bfloat16 in 12 bits each: of 32 that are read
// together a byte each, with the sign above the 7 bits of the mantissa, then 4 bits each, which are 0 for an exponent
// of 0 and otherwise the exponent less `before`. What has another exponent is a zero there, and an Outlier.
// CODES are 8-bit codes that x's rows, in 8-bit codes too, are multiplied by: sums of whole numbers have no rounding, so
// all instruction sets have the same. A sum is multiplied by the scale of its output, then by that of its row.
// NIBBLES are 4-bit codes that such rows are multiplied by. The sum of a group of inputs, of codes less 8, is multiplied
// by the group's scale. These products are added to 0 in order, in floats, and that is multiplied by the row's scale.
enum Form { NUMBERS, INT8, INT4, BF12, CODES, NIBBLES, FORMS };
constexpr bool has_coded_rows(Form form) { return form == CODES || form == NIBBLES; }
constexpr int64_t LONGEST_GROUP = 1 << 14;  // inputs that share a scale of NIBBLES: a float has each sum of theirs

// A weight whose exponent its panel lacks. They lie behind the weights of all panels, in order.
struct Outlier {
  uint32_t place;  // in the order of weights in 16 bits
  uint32_t weight;  // its bits
};

// Of a panel in 12 bits: the exponent before that of code 1, or -1 if all weights have 16, and where its outliers end.
struct Exponents {
  int32_t before, end;
};

// Of a row in codes: what one stands for, and with what the sums begin.
struct CodedRow {
  float scale;
  int32_t start;
};

struct Product {
  const void *x, *w, *scales;  // x in codes: a RowCoding's; or Exponents of each panel in 12 bits, in the scales' place
  void* y;
  int64_t M, N, K, group;  // group: inputs that share a scale
  bool y_is_bf16, scales_are_bf16;
  Form form;
  const CodedRow* rows = nullptr;  // in codes, with K in whole fours
  int64_t unit = 0;                // of NIBBLES: inputs of a group, or of a part of it, that are added up at once
  const uint32_t* starts = nullptr;  // of NIBBLES: with what the sums of each row's units begin, [M][K/unit]

  int64_t panels() const { return (N + COLS - 1) / COLS; }
};

// Computes y's columns of the panels [first,last). Each number is one sum that begins with 0 and runs along K in
// order, whatever M: a row's bits do not depend on the rows beside it.
using Panels = void (*)(const Product&, int64_t first, int64_t last);

// Rows x[M,K] to code: a row's largest magnitude has code 127. Where it is 0 or not finite all its codes are 0.
struct RowCoding {
  const void* x;
  int64_t K;
  int8_t* codes;  // [M,width()]
  CodedRow* rows;

  int64_t width() const { return (K + 3) / 4 * 4; }
};
using CodeRows = void (*)(const RowCoding&, int64_t first, int64_t last);

// Computes the `starts` of consecutive units of codes.
using StartUnits = void (*)(const int8_t* codes, int64_t units, int64_t unit, uint32_t* starts);

struct Products {
  Panels bf16[FORMS], f32[FORMS];  // by x's kind
  CodeRows code_bf16, code_f32;
  StartUnits start_units;
  int64_t longest_unit;
};

#define DECLARE(isa) namespace isa { extern const Products products; }
FOR_EACH_ISA(DECLARE)
#undef DECLARE
