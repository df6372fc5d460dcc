// CPU loops of csrc/device/onebit.cuh.
#pragma once
#include "../device/onebit.cuh"
#include "blocks.h"

namespace gradcomm::GC_ISA {

struct OneBit {
  static constexpr int kUnit = 128, kRows = kUnit / kLanes;

  OneBit(const Args& a, float* scratch) : units(a.block / kUnit), p(scratch) {}

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64 count, u64) {
    f32x16 even{}, odd{};
    u8* signs = record + onebit::kHeader;
    for (i64 u = 0; u < units; ++u) {
      u32x16 field{};
      for (int row = 0; row < kRows; ++row) {
        const i64 i = u * kUnit + row * kLanes;
        f32x16 x = load<f32x16>(g + i) * gain;
        if constexpr (Feedback) {
          x = x + load<f32x16>(e + i);
          store(p + i, x);
        }
        const u32x16 b = bits_of(x);
        (row % 2 ? odd : even) += float_of(b & kMagnitude);
        field |= (b >> 31) << row;
      }
      store(signs + u * kLanes, convert<u8x16>(field));
    }
    float sums[onebit::kSums];
    store(sums, even);
    store(sums + kLanes, odd);
    const float scale = onebit::fold_sums(sums) / float(count);
    u32 scale_bits = gradcomm::bits_of(scale);
    if (scale_bits >= kInfinity) {  // the mean of magnitudes has no sign, except as a NaN
      scale_bits = kNaN;
      std::memcpy(record, &scale_bits, sizeof(scale_bits));
      std::memset(signs, 0, packed_bytes(units * kUnit, 1));
      return;
    }
    std::memcpy(record, &scale_bits, sizeof(scale_bits));
    if constexpr (Feedback) {
      for (i64 i = 0; i < units * kUnit; i += kLanes) {
        const f32x16 x = load<f32x16>(p + i);
        store(e + i, x - float_of((bits_of(x) & kSign) | scale_bits));
      }
    }
  }

  template <bool First, bool Last>
  void decode(const u8* record, float* sum, float inverse) {
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

  i64 units;
  float* p;
};

}  // namespace gradcomm::GC_ISA
