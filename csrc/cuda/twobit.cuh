// csrc/device/twobit.cuh by a warp. A lane is a partial sum: the fold is a tree of shuffles.
#pragma once
#include "../device/twobit.cuh"
#include "packed.cuh"

namespace gradcomm {

struct TwoBit : Packed<TwoBit, 4> {
  static GC_DEVICE void encode(const Task& t, const float* p, float* e, u8* record, BlockRange r) {
    const int lane = lane_of_thread(), block = int(t.block);
    float sum = 0.0f;
    for (int i = lane; i < block; i += kWarp) sum = sum + float_of(bits_of(p[i]) & kMagnitude);
    for (int width = onebit::kSums / 2; width > 0; width /= 2)
      sum = sum + __shfl_xor_sync(kAllLanes, sum, width);
    const u32 scale = twobit::scale_bits(sum / float(r.count));
    if (lane == 0) store_as(record, scale);
    u8* fields = record + twobit::kHeader;
    if (scale == kNaN) zero_record(fields, t.record - twobit::kHeader);
    else pack(t, p, e, fields, r.count, twobit::levels_of(scale));
  }

  using Head = twobit::Levels;
  struct Word {
    u32 fields;
  };
  static GC_DEVICE Head head(const Task&, const u8* record) {
    return twobit::levels_of(load_as<u32>(record));
  }
  static GC_DEVICE Word word(const Task&, const u8* record, int n) {
    return {load_as<u32>(record + twobit::kHeader + 4 * n)};
  }
  static GC_DEVICE float value(const Task&, const Head& head, Word word, int row, int c) {
    return float_of(twobit::decoded_bits(head, word.fields >> (8 * c + 2 * row)));
  }

 private:
  // A lane makes a word at a time: four neighbouring elements of each row of a unit.
  static GC_DEVICE void pack(const Task& t, const float* p, float* e, u8* fields, i64 count,
                             const twobit::Levels& levels) {
    constexpr int kRows = 4;
    const bool aligned = is_aligned(e, 16);
    for (int n = lane_of_thread(); n < int(t.block) / (4 * kRows); n += kWarp) {
      u32 word = 0;
      GC_UNROLL(2)
      for (int row = 0; row < kRows; ++row) {
        const int i = n / 4 * (kRows * kLanes) + row * kLanes + n % 4 * 4;
        Four x = load_as<Four>(p + i);
        for (int c = 0; c < 4; ++c) {
          const u32 field = twobit::field_of(bits_of(x.v[c]), levels.threshold);
          word |= field << (8 * c + 2 * row);
          x.v[c] = x.v[c] - float_of(twobit::decoded_bits(levels, field));
        }
        if (e != nullptr) put_residual(e, aligned, i, count, x);
      }
      store_as(fields + 4 * n, word);
    }
  }
};

}  // namespace gradcomm
