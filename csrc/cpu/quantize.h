// CPU loops of csrc/device/quantize.cuh.
#pragma once
#include "../device/quantize.cuh"
#include "blocks.h"

namespace gradcomm::GC_ISA {

template <int Bits, bool Asymmetric, bool Stochastic>
struct Quantize {
  static constexpr int kRows = 8 / Bits, kUnit = kRows * kLanes;
  static constexpr float kMost = quantize::levels(Bits, Asymmetric);
  static constexpr float kLeast = Asymmetric ? 0.0f : -kMost;
  static constexpr i64 kHeader = Asymmetric ? 8 : 4;

  Quantize(const Args& a, float* scratch) : elements_(a.block), p_(scratch), key_(a.key) {}

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64 count, u64 counter) {
    const i64 elements = elements_;  // copies, or every store might change them
    float* const p = p_;
    u32x16 magnitude{};
    f32x16 low = splat(gradcomm::float_of(kInfinity)), high = -low;
#pragma GCC unroll 4
    for (i64 i = 0; i < elements; i += kLanes) {
      f32x16 x = load<f32x16>(g + i) * gain;
      if constexpr (Feedback) x = x + load<f32x16>(e + i);
      store(p + i, x);
      magnitude = max(magnitude, bits_of(x) & kMagnitude);
      if constexpr (Asymmetric) {
        low = min(low, x);
        high = max(high, x);
      }
    }
    const quantize::Step q = step_of(magnitude, low, high, count);
    u8* fields = record + kHeader;
    if constexpr (Asymmetric) std::memcpy(record, &q.low, sizeof(float));
    std::memcpy(fields - sizeof(float), &q.step, sizeof(float));
    if (!q.finite) std::memset(fields, 0, packed_bytes(elements, Bits));
    else pack<Feedback>(q, e, fields, random_key(key_, counter));
  }

  template <bool First, bool Last>
  void decode(const u8* record, float* sum, float inverse) {
    const i64 elements = elements_;
    float low = 0.0f, step;
    const u8* fields = record + kHeader;
    if constexpr (Asymmetric) std::memcpy(&low, record, sizeof(low));
    std::memcpy(&step, fields - sizeof(step), sizeof(step));
#pragma GCC unroll 2
    for (i64 u = 0; u < elements / kUnit; ++u) {
      const u8x16 packed = load<u8x16>(fields + u * kLanes);
      for (int row = 0; row < kRows; ++row) {
        float* s = sum + u * kUnit + row * kLanes;
        f32x16 x = convert<f32x16>(field(packed, row)) * step;
        if constexpr (Asymmetric) x = x + low;
        if constexpr (!First) x = load<f32x16>(s) + x;
        if constexpr (Last) x = x * inverse;
        store(s, x);
      }
    }
  }

 private:
  quantize::Step step_of(u32x16 magnitude, f32x16 low, f32x16 high, i64 count) {
    const u32 m = largest(magnitude);
    if constexpr (!Asymmetric) return quantize::step_of(m, 0.0f, gradcomm::float_of(m), kMost);
    float least = smallest(low), most = largest(high);
    float* const p = p_;
    if (count < elements_) {  // the zeros behind the count are no elements: look again without them
      least = most = p[0];
      for (i64 i = 1; i < count; ++i) {
        least = p[i] < least ? p[i] : least;
        most = p[i] > most ? p[i] : most;
      }
      for (i64 i = count; i < elements_; ++i) p[i] = least;  // which sends 0
    }
    return quantize::step_of(m, least + 0.0f, most + 0.0f, kMost);
  }

  template <bool Feedback>
  void pack(const quantize::Step& q, float* e, u8* fields, RandomKey random) {
    const i64 elements = elements_;
    const float* const p = p_;
#pragma GCC unroll 2
    for (i64 u = 0; u < elements / kUnit; ++u) {
      u32x16 byte{};
      for (int row = 0; row < kRows; ++row) {
        const i64 i = u * kUnit + row * kLanes;
        const f32x16 x = load<f32x16>(p + i);
        const f32x16 quotient = (Asymmetric ? x - q.low : x) * q.inverse;
        f32x16 sum;
        if constexpr (Stochastic) {
          const u32x16 bits = random_bits(random, kLane + u32(i)) >> 8;
          sum = by_registers(
              [](auto v, auto u) { return quantize::round_stochastic(v, u, kLeast, kMost); }, quotient,
              convert<f32x16>((i32x16)bits) * 0x1p-24f);
        } else {
          sum = quantize::round_nearest(quotient);
        }
        const u32x16 bits = bits_of(sum);
        byte |= (row == kRows - 1 ? bits : bits & ((1u << Bits) - 1)) << (Bits * row);
        if constexpr (Feedback) {
          f32x16 sent = (sum - quantize::kRound) * q.step;
          if constexpr (Asymmetric) sent = sent + q.low;
          store(e + i, x - sent);
        }
      }
      store(fields + u * kLanes, convert<u8x16>(byte));
    }
  }

  static i32x16 field(u8x16 packed, int row) {
    if constexpr (Asymmetric) {
      const u32x16 wide = convert<u32x16>(packed) >> (Bits * row);
      return (i32x16)(row == kRows - 1 ? wide : wide & ((1u << Bits) - 1));
    } else {
      const i32x16 wide = convert<i32x16>((i8x16)packed);
      return row == kRows - 1 ? wide >> (8 - Bits) : wide << (32 - Bits * (row + 1)) >> (32 - Bits);
    }
  }

  static constexpr u32x16 kLane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  i64 elements_;
  float* p_;
  u64 key_;
};

// Calls loop.operator()<Format>() with the variant that the format's options name.
template <int Bits, class Loop>
void with_quantize_bits(const Args& a, Loop&& loop) {
  if (a.format[3] != 0)
    a.format[4] != 0 ? loop.template operator()<Quantize<Bits, true, true>>()
                     : loop.template operator()<Quantize<Bits, true, false>>();
  else
    a.format[4] != 0 ? loop.template operator()<Quantize<Bits, false, true>>()
                     : loop.template operator()<Quantize<Bits, false, false>>();
}

template <class Loop>
void with_quantize(const Args& a, Loop&& loop) {
  switch (a.format[2]) {
    case 2: return with_quantize_bits<2>(a, loop);
    case 4: return with_quantize_bits<4>(a, loop);
    default: return with_quantize_bits<8>(a, loop);
  }
}

}  // namespace gradcomm::GC_ISA
