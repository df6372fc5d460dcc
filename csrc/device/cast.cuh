// Cast: every element as one float32, float16 or bfloat16.
//
// Record of a block of B elements (B a multiple of 16): B values of the wire type, no header.
//
// Rounding is to nearest, ties to even. A finite element never becomes infinite: beyond the type's
// largest value it becomes that (float16: 65504). Inf stays Inf, every NaN becomes the one NaN of the
// type. The residual of an element that is not finite stays as it was, element by element.
#pragma once
#include "format.cuh"

namespace gradcomm::cast {

GC_INLINE i64 record_bytes(i64 block, i64 wire) { return block * wire_size(wire); }

GC_INLINE const char* fault(i64 block, i64 wire) {
  if (wire != kFloat32 && wire != kFloat16 && wire != kBFloat16)
    return "cast needs a wire type of 0 (float32), 1 (float16) or 2 (bfloat16)";
  return block >= kLanes && block <= 4096 && block % kLanes == 0
             ? nullptr
             : "cast needs a block from 16 to 4096 that 16 divides";
}

// The largest finite magnitude of a wire type, as float32 bits.
GC_INLINE constexpr u32 largest(i64 wire) {
  return wire == kFloat16 ? 0x477fe000u : wire == kBFloat16 ? 0x7f7f0000u : 0x7f7fffffu;
}

// Finite values moved into the range of the wire type, NaN made canonical. U: u32 or a vector of it.
template <class U>
GC_INLINE U sendable(U bits, u32 largest) {
  const U m = bits & kMagnitude;
  const U near = m > largest ? (bits & kSign) | largest : bits;
  const U finite_or_nan = m > kInfinity ? U{} + kNaN : near;
  return m == kInfinity ? bits : finite_or_nan;
}

}  // namespace gradcomm::cast
