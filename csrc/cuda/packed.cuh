// Decoding formats whose fields are packed in units (csrc/device/format.cuh): a lane reads one word
// of a unit's 16 bytes and decodes four neighbouring elements of up to two of its rows.
#pragma once
#include "blocks.cuh"

namespace gradcomm {

// A format derives from this and has kRows (rows of a unit: 1, 2, 4 or 8), and
//   struct Head                                   what a record begins with
//   static Head head(const Task&, const u8* record);
//   struct Word                                   what a lane reads at once: four elements of each
//   row static Word word(const Task&, const u8* record, int n); static float value(const Task&,
//   const Head&, const Word&, int row, int c);
template <class Format, int kRows>
struct Packed {
  static constexpr int kUnit = kRows * kLanes;
  static constexpr int kHeld = kRows < 2 ? kRows : 2;  // rows that a lane decodes at once
  static constexpr int kParts = kRows / kHeld;
  static constexpr int kWords = 4;  // of a unit

  template <class Put>
  static GC_DEVICE void mean(const Task& t, const u8* record, float*, Put put) {
    const float inverse = 1.0f / float(t.ranks);
    const int groups = int(t.block) / (4 * kHeld);
    for (int n = lane_of_thread(); n < groups; n += kWarp) {
      const int column = n % kWords, unit = n / (kWords * kParts);
      const int first = n / kWords % kParts * kHeld;
      Four sum[kHeld];
      GC_UNROLL(4)
      for (i64 rank = 0; rank < t.ranks; ++rank) {
        const u8* at = record + rank * t.rank_stride;
        const auto head = Format::head(t, at);
        const auto word = Format::word(t, at, unit * kWords + column);
        for (int q = 0; q < kHeld; ++q)
          for (int c = 0; c < 4; ++c) {
            const float x = Format::value(t, head, word, first + q, c);
            sum[q].v[c] = rank == 0 ? x : sum[q].v[c] + x;
          }
      }
      for (int q = 0; q < kHeld; ++q) {
        for (int c = 0; c < 4; ++c) sum[q].v[c] = sum[q].v[c] * inverse;
        put(unit * kUnit + (first + q) * kLanes + 4 * column, sum[q]);
      }
    }
  }
};

}  // namespace gradcomm
