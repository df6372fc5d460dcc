// CPU loops of csrc/device/topk_values.cuh: the values of a record, to the wire and back.
#pragma once
#include "../device/topk_values.cuh"
#include "simd.h"

namespace gradcomm::GC_ISA {

// Writes n values, and their scale when they are int8. `v` becomes what is left of each, v minus what
// its bytes decode to; NaN stands for "the residual stays as it was".
inline void write_values(i64 type, float* v, i64 n, u8* values, u8* scale_bytes) {
  if (type == kFloat32) {
    for (i64 i = 0; i < n; ++i) {
      const u32 b = topk::canonical(gradcomm::bits_of(v[i]));
      std::memcpy(values + 4 * i, &b, 4);
      v[i] = (b & kMagnitude) >= kInfinity ? gradcomm::float_of(kNaN) : 0.0f;
    }
  } else if (type == kFloat16) {
    for (i64 i = 0; i < n; ++i) {
      const u16 h = topk::saturated_f16(v[i]);
      std::memcpy(values + 2 * i, &h, 2);
      const bool finite = (gradcomm::bits_of(v[i]) & kMagnitude) < kInfinity;
      v[i] = finite ? v[i] - gradcomm::float_of_f16(h) : gradcomm::float_of(kNaN);
    }
  } else {
    u32 largest_key = 0;
    for (i64 i = 0; i < n; ++i) {
      const u32 key = gradcomm::order_key(gradcomm::bits_of(v[i]));
      largest_key = key > largest_key ? key : largest_key;
    }
    const float scale = topk::int8_scale(largest_key);
    std::memcpy(scale_bytes, &scale, 4);
    if (largest_key >= kInfinity) {
      std::memset(values, 0, n);
      for (i64 i = 0; i < n; ++i) v[i] = scale;
      return;
    }
    const float inverse = topk::int8_inverse(scale);
    for (i64 i = 0; i < n; ++i) {
      const float q = topk::int8_quantum(v[i], inverse);
      values[i] = u8(i8(q));
      v[i] -= q * scale;
    }
  }
}

// Values [begin, begin + n) times inverse.
inline void read_values(i64 type, const u8* values, const u8* scale_bytes, i64 begin, i64 n,
                        float inverse, float* v) {
  if (type == kFloat32) {
    std::memcpy(v, values + 4 * begin, 4 * n);
    for (i64 i = 0; i < n; ++i) v[i] *= inverse;
  } else if (type == kFloat16) {
    for (i64 i = 0; i < n; ++i) {
      u16 h;
      std::memcpy(&h, values + 2 * (begin + i), 2);
      v[i] = gradcomm::float_of_f16(h) * inverse;
    }
  } else {
    float scale;
    std::memcpy(&scale, scale_bytes, 4);
    for (i64 i = 0; i < n; ++i) v[i] = float(i8(values[begin + i])) * scale * inverse;
  }
}

}  // namespace gradcomm::GC_ISA
