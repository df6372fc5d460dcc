// csrc/device/onebit.cuh by a warp. A lane is a partial sum: the fold is a tree of shuffles.
#pragma once
#include "../device/onebit.cuh"
#include "packed.cuh"

namespace gradcomm {

struct OneBit : Packed<OneBit, 8> {
  static GC_DEVICE void encode(const Task& t, const float* p, float* e, u8* record, BlockRange r) {
    constexpr int kUnit = 128, kUnits = 4;  // so many units' signs fill a lane's word
    const int lane = lane_of_thread(), block = int(t.block), half = lane / kLanes;
    u8* signs = record + onebit::kHeader + lane % kLanes;
    float sum = 0.0f;
    for (int begin = 0; begin < block; begin += kUnits * kUnit) {
      u32 word = 0;  // byte u: what this lane has of unit u
      GC_UNROLL(4)
      for (int u = 0; u < kUnits; ++u) {
        if (begin + u * kUnit >= block) break;
        GC_UNROLL(4)
        for (int i = 0; i < kUnit / kWarp; ++i) {  // 32 elements are two rows
          const u32 b = bits_of(p[begin + u * kUnit + i * kWarp + lane]);
          sum = sum + float_of(b & kMagnitude);
          word |= (b >> 31) << (8 * u + 2 * i + half);
        }
      }
      word |= __shfl_xor_sync(kAllLanes, word, kLanes);
      for (int u = 2 * half; u < 2 * half + 2; ++u)  // each half of the warp writes two units
        if (begin + u * kUnit < block) signs[(begin + u * kUnit) / 8] = u8(word >> (8 * u));
    }
    for (int width = onebit::kSums / 2; width > 0; width /= 2)
      sum = sum + __shfl_xor_sync(kAllLanes, sum, width);
    u32 scale = bits_of(sum / float(r.count));
    const bool finite = scale < kInfinity;  // the mean of magnitudes has no sign, except as a NaN
    if (!finite) scale = kNaN;
    if (lane == 0) store_as(record, scale);
    if (!finite) {
      __syncwarp();  // the signs are written by other lanes than wipe them
      zero_record(record + onebit::kHeader, t.record - onebit::kHeader);
    } else if (e != nullptr) {
      write_residual(t, r.count, e, p,
                     [=](float x, int) { return x - float_of((bits_of(x) & kSign) | scale); });
    }
  }

  struct Head {
    u32 scale;
  };
  struct Word {
    u32 signs;
  };
  static GC_DEVICE Head head(const Task&, const u8* record) { return {load_as<u32>(record)}; }
  static GC_DEVICE Word word(const Task&, const u8* record, int n) {
    return {load_as<u32>(record + onebit::kHeader + 4 * n)};
  }
  static GC_DEVICE float value(const Task&, Head head, Word word, int row, int c) {
    return float_of(onebit::decoded_bits(head.scale, word.signs >> (8 * c + row)));
  }
};

}  // namespace gradcomm
