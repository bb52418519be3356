// Narrow weights: numbers that are kept as codes of 8 or 4 bits with scales.
//
// A packed weight [N, K] stands in tiles of 64 columns, each of whole groups of an even number of k. A
// group begins with its 64 scales, perhaps 64 zeros (int8) and perhaps 64 minima, of the scales' type. Codes follow in the order in which the
// numbers stand in a packed weight of the type `wide` (gemm.h), in units of two k, which are 128 numbers:
//   8 bits   [128] bytes
//   4 bits   [16] words of 32 bits: number 16 * j + i is in the bits from 4 * j on of word i
// The layout is the same on every instruction set. The number is (value - zero) * scale, rounded to
// float32, less the minimum, rounded to float32, then to the type `wide`; a bf16 number that is denormal may become zero, as which products
// on AVX512_BF16 take it anyway, or keep more digits.
//
// 8-bit floats, which every type has, are multiplied as they are: within a leaf, the sum of a group's products
// is multiplied with its scale, and groups are added in ascending order from 0 on, each product and sum rounded.
#pragma once
#include "gemm.h"

namespace quire {

constexpr int64_t kUnit = 128;

// Bytes of a unit.
static inline int64_t unit_bytes(const Linear& layer) { return layer.dtype == kTable4 ? kUnit / 2 : kUnit; }
// Whether scales belong to the sums of groups, not to numbers.
static inline bool scales_sums(const Linear& layer) { return layer.dtype == kE4M3 || layer.dtype == kE5M2; }
// Of a group: scales, zeros and codes.
static inline int64_t group_bytes(const Linear& layer) {
  return group_head(layer) + layer.coded.group / 2 * unit_bytes(layer);
}
// The place of a number in its unit.
static inline int64_t place_in_unit(int wide, int64_t k, int64_t column) {
  return wide == kBF16 ? 2 * column + k % 2 : k % 2 * kTile + column;
}

}  // namespace quire
