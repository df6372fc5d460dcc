// csrc/device/quantize.cuh by a warp. The options but for the bits are asked for as it runs: a
// branch that all lanes take alike costs less than four times as many kernels.
#pragma once
#include "../device/quantize.cuh"
#include "packed.cuh"

namespace gradcomm {

template <int Bits>
struct Quantize : Packed<Quantize<Bits>, 8 / Bits> {
  static constexpr int kRows = 8 / Bits;
  static constexpr u32 kField = (1u << Bits) - 1;

  static GC_DEVICE void encode(const Task& t, float* p, float* e, u8* record, BlockRange r) {
    const bool asymmetric = t.format[3] != 0;
    const quantize::Step q = step_of(t, p, r.count, asymmetric);
    u8* fields = record + quantize::header_bytes(asymmetric);
    if (lane_of_thread() == 0) {
      if (asymmetric) store_as(record, q.low);
      store_as(fields - sizeof(float), q.step);
    }
    if (!q.finite) zero_record(fields, packed_bytes(t.block, Bits));
    else pack(t, p, e, fields, r, q, asymmetric);
  }

  struct Head {
    float low, step;
  };
  struct Word {
    u32 fields;
  };
  static GC_DEVICE Head head(const Task& t, const u8* record) {
    if (t.format[3] == 0) return {0.0f, load_as<float>(record)};
    return {load_as<float>(record), load_as<float>(record + 4)};
  }
  static GC_DEVICE Word word(const Task& t, const u8* record, int n) {
    return {load_as<u32>(record + quantize::header_bytes(t.format[3] != 0) + 4 * n)};
  }
  static GC_DEVICE float value(const Task& t, Head head, Word word, int row, int c) {
    const u32 field = word.fields >> (8 * c + Bits * row) & kField;
    if (t.format[3] != 0) return float(field) * head.step + head.low;
    return float(i32(field << (32 - Bits)) >> (32 - Bits)) * head.step;
  }

 private:
  static GC_DEVICE quantize::Step step_of(const Task& t, float* p, i64 count, bool asymmetric) {
    const int lane = lane_of_thread();
    u32 magnitude = 0;
    float low = float_of(kInfinity), high = -low;
    for (int i = lane; i < t.block; i += kWarp) {
      const float x = p[i];
      const u32 m = bits_of(x) & kMagnitude;
      magnitude = m > magnitude ? m : magnitude;
      if (i < count) {  // the zeros behind the count are no elements
        low = x < low ? x : low;
        high = x > high ? x : high;
      }
    }
    magnitude = largest_of_warp(magnitude);
    const float levels = quantize::levels(Bits, asymmetric);
    if (!asymmetric) return quantize::step_of(magnitude, 0.0f, float_of(magnitude), levels);
    for (int width = kWarp / 2; width > 0; width /= 2) {
      const float other_low = __shfl_xor_sync(kAllLanes, low, width);
      const float other_high = __shfl_xor_sync(kAllLanes, high, width);
      low = other_low < low ? other_low : low;
      high = other_high > high ? other_high : high;
    }
    low = low + 0.0f;                                                     // -0 is sent as +0
    __syncwarp();                                                         // all have read the tile
    for (int i = int(count) + lane; i < t.block; i += kWarp) p[i] = low;  // which sends 0
    __syncwarp();
    return quantize::step_of(magnitude, low, high + 0.0f, levels);
  }

  // A lane makes a word at a time: four neighbouring elements of each row of a unit.
  static GC_DEVICE void pack(const Task& t, const float* p, float* e, u8* fields, BlockRange r,
                             const quantize::Step& q, bool asymmetric) {
    const bool stochastic = t.format[4] != 0, aligned = is_aligned(e, 16);
    const float most = quantize::levels(Bits, asymmetric), least = asymmetric ? 0.0f : -most;
    const RandomKey random = random_key(t.key, u64(r.counter));
    for (int n = lane_of_thread(); n < int(t.block) / (4 * kRows); n += kWarp) {
      u32 word = 0;
      GC_UNROLL(1)  // more would not fit the registers
      for (int row = 0; row < kRows; ++row) {
        const int i = n / 4 * (kRows * kLanes) + row * kLanes + n % 4 * 4;
        Four x = load_as<Four>(p + i);
        for (int c = 0; c < 4; ++c) {
          const float quotient = (asymmetric ? x.v[c] - q.low : x.v[c]) * q.inverse;
          float sum;
          if (stochastic) {
            const float u = float(i32(random_bits(random, u32(i + c)) >> 8)) * 0x1p-24f;
            sum = quantize::round_stochastic(quotient, u, least, most);
          } else {
            sum = quantize::round_nearest(quotient);
          }
          word |= (bits_of(sum) & kField) << (8 * c + Bits * row);
          float sent = (sum - quantize::kRound) * q.step;
          if (asymmetric) sent = sent + q.low;
          x.v[c] = x.v[c] - sent;
        }
        if (e != nullptr) put_residual(e, aligned, i, r.count, x);
      }
      store_as(fields + 4 * n, word);
    }
  }
};

using Quantize2 = Quantize<2>;
using Quantize4 = Quantize<4>;
using Quantize8 = Quantize<8>;

}  // namespace gradcomm
