// 1-bit: sign and mean magnitude of a block (Seide et al. 2014; Karimireddy et al. 2019).
//
// Record of a block of B elements (B a multiple of 128):
//   float32 scale              mean |p|, or NaN for a block with a non-finite element or mean
//   u8      signs[B / 8]       1-bit fields, 1 for negative; all 0 when the scale is NaN
//
// The mean is summed in 32 partial sums (element i into sum i mod 32), folded 16, 8, 4, 2, 1 and
// divided by the number of elements in use.
#pragma once
#include "format.cuh"

namespace gradcomm::onebit {

constexpr i64 kHeader = 4;
constexpr int kSums = 32;

GC_INLINE i64 record_bytes(i64 block) { return kHeader + packed_bytes(block, 1); }

GC_INLINE float fold_sums(float* sums) {
  for (int width = kSums / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

// The value that a sign bit stands for.
template <class U>
GC_INLINE U decoded_bits(u32 scale_bits, U sign) {
  return (sign << 31) ^ scale_bits;
}

}  // namespace gradcomm::onebit
