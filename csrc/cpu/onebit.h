// CPU loops of csrc/device/onebit.cuh.
#pragma once
#include "../device/onebit.cuh"
#include "blocks.h"

namespace gradcomm::GC_ISA {

struct OneBit {
  static constexpr int kUnit = 128, kRows = kUnit / kLanes;

  OneBit(const Args& a, float* scratch) : units_(a.block / kUnit), p_(scratch) {}

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64 count, u64) {
    const i64 units = units_;  // copies, or every store might change them
    float* const p = p_;
    f32x16 even{}, odd{};
    u8* signs = record + onebit::kHeader;
    for (i64 u = 0; u < units; ++u) {
      u32x16 field{};  // the last sign on top, those before it one below the other
      for (int row = 0; row < kRows; ++row) {
        const i64 i = u * kUnit + row * kLanes;
        f32x16 x = load<f32x16>(g + i) * gain;
        if constexpr (Feedback) {
          x = x + load<f32x16>(e + i);
          store(p + i, x);
        }
        const u32x16 b = bits_of(x);
        (row % 2 ? odd : even) += float_of(b & kMagnitude);
        field = (field >> 1) | (b & kSign);
      }
      store(signs + u * kLanes, convert<u8x16>(field >> (32 - kRows)));
    }
    // The first of onebit::fold_sums' steps, then the others.
    const float total = fold(even + odd, [](auto a, auto b) { return a + b; });
    u32 scale_bits = gradcomm::bits_of(total / float(count));
    if (scale_bits >= kInfinity) {  // the mean of magnitudes has no sign, except as a NaN
      scale_bits = kNaN;
      std::memcpy(record, &scale_bits, sizeof(scale_bits));
      std::memset(signs, 0, packed_bytes(units * kUnit, 1));
      return;
    }
    std::memcpy(record, &scale_bits, sizeof(scale_bits));
    if constexpr (Feedback) {
      for (i64 u = 0; u < units; ++u)
        for (int row = 0; row < kRows; ++row) {
          const i64 i = u * kUnit + row * kLanes;
          const f32x16 x = load<f32x16>(p + i);
          store(e + i, x - float_of((bits_of(x) & kSign) | scale_bits));
        }
    }
  }

  template <bool First, bool Last>
  void decode(const u8* record, float* sum, float inverse) {
    const i64 units = units_;
    u32 scale_bits;
    std::memcpy(&scale_bits, record, sizeof(scale_bits));
    const u8* signs = record + onebit::kHeader;
    for (i64 u = 0; u < units; ++u) {
      const u32x16 field = convert<u32x16>(load<u8x16>(signs + u * kLanes));
      for (int row = 0; row < kRows; ++row) {
        float* s = sum + u * kUnit + row * kLanes;
        f32x16 x = float_of(onebit::decoded_bits(scale_bits, field >> row));
        if constexpr (!First) x = load<f32x16>(s) + x;
        if constexpr (Last) x = x * inverse;
        store(s, x);
      }
    }
  }

 private:
  i64 units_;
  float* p_;
};

}  // namespace gradcomm::GC_ISA
