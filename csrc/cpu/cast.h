// CPU loops of csrc/device/cast.cuh.
#pragma once
#include "../device/cast.cuh"
#include "blocks.h"

namespace gradcomm::GC_ISA {

template <i64 Wire>
struct Cast {
  Cast(const Args& a, float*) : elements_(a.block) {}

  static f32x16 load_wire(const u8* from) {
    if constexpr (Wire == kFloat16) return float_of_f16(load<u16x16>(from));
    else if constexpr (Wire == kBFloat16) return float_of_bf16(load<u16x16>(from));
    else return load<f32x16>(from);
  }

  // Stores a row and returns what it decodes to.
  static f32x16 store_wire(u8* to, u32x16 b) {
    if constexpr (Wire == kFloat16) {
      const F16Row half = round_to_f16(float_of(b));
      store(to, half.bits);
      return half.value;
    } else if constexpr (Wire == kBFloat16) {
      const u32x16 half = bf16_bits(b);
      store(to, convert<u16x16>(half));
      return float_of(half << 16);
    } else {
      store(to, b);
      return float_of(b);
    }
  }

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64, u64) {
    const i64 elements = elements_;  // a copy, or every store might change it
    for (i64 i = 0; i < elements; i += kLanes) {
      f32x16 x = load<f32x16>(g + i) * gain;
      f32x16 old{};
      if constexpr (Feedback) {
        old = load<f32x16>(e + i);
        x = x + old;
      }
      const u32x16 b = bits_of(x);
      const u32x16 send = by_registers([](auto x) { return cast::sendable(x, cast::largest(Wire)); }, b);
      const f32x16 sent = store_wire(record + i * wire_size(Wire), send);
      if constexpr (Feedback) store(e + i, select((b & kMagnitude) < kInfinity, x - sent, old));
    }
  }

  template <bool First, bool Last>
  void decode(const u8* record, float* sum, float inverse) {
    const i64 elements = elements_;
    for (i64 i = 0; i < elements; i += kLanes) {
      f32x16 x = load_wire(record + i * wire_size(Wire));
      if constexpr (!First) x = load<f32x16>(sum + i) + x;
      if constexpr (Last) x = x * inverse;
      store(sum + i, x);
    }
  }

 private:
  i64 elements_;
};

// Calls loop.operator()<Format>() with the variant of the format's wire type.
template <class Loop>
void with_cast(const Args& a, Loop&& loop) {
  switch (a.format[2]) {
    case kFloat16: return loop.template operator()<Cast<kFloat16>>();
    case kBFloat16: return loop.template operator()<Cast<kBFloat16>>();
    default: return loop.template operator()<Cast<kFloat32>>();
  }
}

}  // namespace gradcomm::GC_ISA
