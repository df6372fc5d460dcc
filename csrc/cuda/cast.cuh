// csrc/device/cast.cuh by a warp: element by element.
#pragma once
#include "../device/cast.cuh"
#include "packed.cuh"

namespace gradcomm {

struct Cast : Packed<Cast, 1> {
  static GC_DEVICE void encode(const Task& t, const float* p, float* e, u8* record, BlockRange r) {
    const i64 wire = t.format[2];
    const u32 largest = cast::largest(wire);
    const bool aligned = is_aligned(e, 16), wide = is_aligned(record, 16);
    for (int i = 4 * lane_of_thread(); i < t.block; i += kStep) {
      Four x = load_as<Four>(p + i), old{};
      if (e != nullptr) old = get_residual(e, aligned, i);
      u32 word[4];
      for (int c = 0; c < 4; ++c) {
        const u32 b = bits_of(x.v[c]);
        word[c] = cast::sendable(b, largest);
        float sent = float_of(word[c]);
        if (wire == kFloat16) {
          word[c] = f16_bits<float>(word[c]);
          sent = float_of(f32_bits_of_f16<float>(word[c]));
        } else if (wire == kBFloat16) {
          word[c] = bf16_bits(word[c]);
          sent = float_of(word[c] << 16);
        }
        x.v[c] = (b & kMagnitude) < kInfinity ? x.v[c] - sent : old.v[c];
      }
      if (wire != kFloat32) {
        store_as(record + 2 * i, word[0] | word[1] << 16);
        store_as(record + 2 * i + 4, word[2] | word[3] << 16);
      } else if (wide) {
        store_as(record + 4 * i, FourWords{{word[0], word[1], word[2], word[3]}});
      } else {
        for (int c = 0; c < 4; ++c) store_as(record + 4 * i + 4 * c, word[c]);
      }
      if (e != nullptr) put_residual(e, aligned, i, r.count, x);
    }
  }

  struct Head {};
  using Word = FourWords;  // four elements' bits; halves two a word
  static GC_DEVICE Head head(const Task&, const u8*) { return {}; }
  static GC_DEVICE Word word(const Task& t, const u8* record, int n) {
    Word w{};
    const u8* at = record + n * 4 * int(wire_size(t.format[2]));
    if (t.format[2] != kFloat32) {
      w.v[0] = load_as<u32>(at);
      w.v[1] = load_as<u32>(at + 4);
    } else if (is_aligned(at, 16)) {
      w = load_as<Word>(at);
    } else {
      for (int c = 0; c < 4; ++c) w.v[c] = load_as<u32>(at + 4 * c);
    }
    return w;
  }
  static GC_DEVICE float value(const Task& t, Head, const Word& w, int, int c) {
    if (t.format[2] == kFloat32) return float_of(w.v[c]);
    const u32 half = w.v[c / 2] >> (16 * (c % 2)) & 0xffffu;
    return float_of(t.format[2] == kFloat16 ? f32_bits_of_f16<float>(half) : half << 16);
  }
};

}  // namespace gradcomm
