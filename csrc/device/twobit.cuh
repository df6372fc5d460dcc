// 2 bits: sign and one bit of magnitude, at the levels that are best for normally distributed elements
// (Lloyd, "Least Squares Quantization in PCM", 1982; Max 1960), as shares of the mean magnitude.
//
// Record of a block of B elements (B a multiple of 128):
//   float32 scale              mean |p| as in onebit.cuh, or NaN for a block with a non-finite element,
//   or
//                              whose upper level is not finite
//   u8      fields[B / 4]      2-bit fields: 1 for negative, plus 2 for |p| over the threshold; all 0
//                              when the scale is NaN
#pragma once
#include "onebit.cuh"

namespace gradcomm::twobit {

constexpr i64 kHeader = 4;
// Of the normal distribution 0.4528, 1.5104 and 0.9816 standard deviations, of which the mean is 0.7979.
constexpr float kLow = 0.5675f, kHigh = 1.893f, kThreshold = 1.23025f;

GC_INLINE i64 record_bytes(i64 block) { return kHeader + packed_bytes(block, 2); }

GC_INLINE u32 scale_bits(float mean) {
  return bits_of(mean * kHigh) < kInfinity ? bits_of(mean) : kNaN;  // a mean has no sign, but as a NaN
}

struct Levels {
  u32 low, flip, threshold;  // bits of the lower level, what makes them the upper's, bits to be over
};
GC_INLINE Levels levels_of(u32 scale) {
  if (scale >= kInfinity) return {kNaN, 0, kInfinity};
  const float mean = float_of(scale);
  const u32 low = bits_of(mean * kLow);
  return {low, low ^ bits_of(mean * kHigh), bits_of(mean * kThreshold)};
}

// Of an element's bits; `threshold` as many times as U has lanes.
template <class U>
GC_INLINE U field_of(U bits, U threshold) {
  return (bits >> 31) | (((threshold - (bits & kMagnitude)) >> 31) << 1);
}

// What a field stands for; bits above it are not looked at.
template <class U>
GC_INLINE U decoded_bits(const Levels& levels, U field) {
  return (((U{} - ((field >> 1) & 1u)) & levels.flip) ^ levels.low) ^ (field << 31);
}

}  // namespace gradcomm::twobit
