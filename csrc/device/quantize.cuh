// n-bit integers (n = 2, 4 or 8) with a step for each block (QSGD, Alistarh et al. 2017; 8-bit after
// Dettmers 2016), symmetric about zero or from the block's least to its largest element.
//
// Record of a block of B elements (B a multiple of 64 and of the packing unit):
//   float32 low             asymmetric only: min p over the elements in use; -0 is sent as +0
//   float32 step            s = max|p| / (2^(n-1) - 1), or (max p - min p) / (2^n - 1)
//   u8      fields[B n / 8] n-bit fields (format.cuh): q in two's complement when symmetric (sign
//                           extension is the cheapest way back), else q itself, unsigned
// Element: s q, or s q + low. Elements not in use send 0.
//
//   q = round(x), ties to even                nearest
//   q = floor(x + u), clamped to the range    stochastic: u = 2^-24 (random_bits >> 8), keyed by
//                                             (key, first element of the block), counted in the block
// where x = p (1/s), or (p - low) (1/s): one division a block. Nearest needs no clamp, |x| being at
// most 2^-21 over the largest q.
//
// Blocks with nothing to divide by: max|p| (or the range) under 1e-30 sends step 0 and fields 0, so 0
// (or low) is decoded and the residual keeps the rest. A block with an element that is not finite, or
// with a range over the largest float32, sends step NaN, low 0 and fields 0: NaN everywhere. A step
// whose largest decoded value would overflow is taken one unit smaller: finite stays finite.
#pragma once
#include "format.cuh"

namespace gradcomm::quantize {

constexpr float kTiny = 1e-30f;        // below this 1/s might overflow
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low mantissa bits

GC_INLINE i64 header_bytes(bool asymmetric) { return asymmetric ? 8 : 4; }
GC_INLINE i64 record_bytes(i64 block, i64 bits, bool asymmetric) {
  return header_bytes(asymmetric) + packed_bytes(block, bits);
}

GC_INLINE const char* fault(i64 block, i64 bits, i64 asymmetric, i64 stochastic) {
  if (bits != 2 && bits != 4 && bits != 8) return "quantize needs 2, 4 or 8 bits";
  if ((asymmetric | stochastic) & ~i64(1)) return "quantize: asymmetric and stochastic are 0 or 1";
  return block >= 64 && block <= 4096 && block % 64 == 0
             ? nullptr
             : "quantize needs a block from 64 to 4096 that 64 divides";
}

// The largest q; the least is its negative when symmetric, else 0.
GC_INLINE constexpr float levels(int bits, bool asymmetric) {
  return float(asymmetric ? (1 << bits) - 1 : (1 << (bits - 1)) - 1);
}

struct Step {
  float low, step, inverse;
  bool finite;
};

// From the largest magnitude (as bits) and the range of a block; symmetric: low 0, high max|p|.
GC_INLINE Step step_of(u32 magnitude, float low, float high, float levels) {
  const float range = high - low;
  if (magnitude >= kInfinity || bits_of(range) >= kInfinity)
    return Step{0.0f, float_of(kNaN), 0.0f, false};
  if (range < kTiny) return Step{low, 0.0f, 0.0f, true};
  float step = range / levels;
  if ((bits_of(step * levels + low) & kMagnitude) >= kInfinity) step = float_of(bits_of(step) - 1);
  return Step{low, step, 1.0f / step, true};
}

// Both return kRound + q: q is what is left without kRound, its field the low bits of the sum's own.
// F: float or a vector of it; |x| under 2^21, u in [0, 1).
template <class F>
GC_INLINE F round_nearest(F x) {
  return x + kRound;
}
template <class F>
GC_INLINE F round_stochastic(F x, F u, float least, float most) {
  const F low = F{} + least, high = F{} + most;
  F y = x + u;
  y = low > y ? low : y;
  y = high < y ? high : y;
  const F near = y + kRound;
  return near - kRound > y ? near - 1.0f : near;
}

}  // namespace gradcomm::quantize
