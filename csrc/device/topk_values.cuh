// What the two top-k formats share: how the values that are sent travel.
//
// float32: the bits. float16: rounded to nearest even, finite values saturate at +-65504. int8: the
// values that share a scale are quantized symmetrically, scale = max|v| / 127; a non-finite value
// makes the scale NaN and every quantum 0. A NaN is always the canonical one.
#pragma once
#include "format.cuh"

namespace gradcomm::topk {

constexpr float kTiny = 1e-30f;  // below this 1/scale would leave float32: send zeros

GC_INLINE bool is_value_type(i64 type) { return type == kFloat32 || type == kFloat16 || type == kInt8; }

GC_INLINE u32 canonical(u32 bits) { return (bits & kMagnitude) > kInfinity ? kNaN : bits; }

GC_INLINE u16 saturated_f16(float v) {
  const u32 b = bits_of(v), m = b & kMagnitude;
  const u32 inside = m > 0x477fe000u && m < kInfinity ? 0x477fe000u : m;  // 65504
  const u32 sign = m > kInfinity ? 0u : b & kSign;
  return f16_of_float(float_of(inside | sign));
}

// From the largest order_key of the values. The largest float's quotient is rounded up, and 127 times
// that would be Inf: kLargestScale is the largest scale whose quanta are all finite.
constexpr u32 kLargestScale = 0x7c010203u;

GC_INLINE float int8_scale(u32 largest_key) {
  if (largest_key >= kInfinity) return float_of(kNaN);
  const float m = float_of(largest_key);
  if (m < kTiny) return 0.0f;
  const float scale = m / 127.0f, largest = float_of(kLargestScale);
  return scale < largest ? scale : largest;
}

// By which values are multiplied before rounding; 0 makes every quantum 0.
GC_INLINE float int8_inverse(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

GC_INLINE float int8_quantum(float v, float inverse) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even
  const float q = (v * inverse + kRound) - kRound;
  return q > 127.0f ? 127.0f : (q < -127.0f ? -127.0f : q);
}

}  // namespace gradcomm::topk
