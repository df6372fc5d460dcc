// CPU loops of csrc/device/twobit.cuh.
#pragma once
#include "../device/twobit.cuh"
#include "blocks.h"

namespace gradcomm::GC_ISA {

struct TwoBit {
  static constexpr int kRows = 4, kUnit = kRows * kLanes;

  TwoBit(const Args& a, float* scratch) : units_(a.block / kUnit), p_(scratch) {}

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64 count, u64) {
    const i64 units = units_;  // copies, or every store might change them
    float* const p = p_;
    f32x16 even{}, odd{};
    for (i64 i = 0; i < units * kUnit; i += 2 * kLanes) {
      f32x16 x = load<f32x16>(g + i) * gain, y = load<f32x16>(g + i + kLanes) * gain;
      if constexpr (Feedback) {
        x = x + load<f32x16>(e + i);
        y = y + load<f32x16>(e + i + kLanes);
      }
      store(p + i, x);
      store(p + i + kLanes, y);
      even += float_of(bits_of(x) & kMagnitude);
      odd += float_of(bits_of(y) & kMagnitude);
    }
    // The first of onebit::fold_sums' steps, then the others.
    const float total = fold(even + odd, [](auto a, auto b) { return a + b; });
    const u32 scale = twobit::scale_bits(total / float(count));
    std::memcpy(record, &scale, sizeof(scale));
    u8* fields = record + twobit::kHeader;
    if (scale == kNaN) {
      std::memset(fields, 0, packed_bytes(units * kUnit, 2));
      return;
    }
    const twobit::Levels levels = twobit::levels_of(scale);
    const u32x16 threshold = splat(levels.threshold);
    for (i64 u = 0; u < units; ++u) {
      u32x16 packed{};
      for (int row = 0; row < kRows; ++row) {
        const i64 i = u * kUnit + row * kLanes;
        const f32x16 x = load<f32x16>(p + i);
        const u32x16 field = twobit::field_of(bits_of(x), threshold);
        packed |= field << (2 * row);
        if constexpr (Feedback) store(e + i, x - float_of(twobit::decoded_bits(levels, field)));
      }
      store(fields + u * kLanes, convert<u8x16>(packed));
    }
  }

  template <bool First, bool Last>
  void decode(const u8* record, float* sum, float inverse) {
    const i64 units = units_;
    u32 scale;
    std::memcpy(&scale, record, sizeof(scale));
    const twobit::Levels levels = twobit::levels_of(scale);
    const u8* fields = record + twobit::kHeader;
    for (i64 u = 0; u < units; ++u) {
      const u32x16 packed = convert<u32x16>(load<u8x16>(fields + u * kLanes));
      for (int row = 0; row < kRows; ++row) {
        float* s = sum + u * kUnit + row * kLanes;
        f32x16 x = float_of(twobit::decoded_bits(levels, packed >> (2 * row)));
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
