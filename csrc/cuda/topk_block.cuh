// csrc/device/topk_block.cuh by a warp: lanes l and l + 16 share column l, each with every other
// row.
//
// A row out of bounds in a payload is not reported, which would need the host to wait: it makes the
// first element of its column NaN, which every rank sees, and touches nothing else.
#pragma once
#include "../device/topk_block.cuh"
#include "blocks.cuh"

namespace gradcomm {

struct TopKBlock {
  static GC_DEVICE void encode(const Task& t, float* p, float* e, u8* record, BlockRange r) {
    const topk_block::Wire w = topk_block::wire(t.format);
    const int lane = lane_of_thread(), column = lane % kLanes;
    const bool first_half = lane < kLanes;
    Winner last{~0u, -1};
    float scale = 0.0f, inverse = 0.0f;
    u32 largest = 0;
    for (int s = 0; s < w.k; ++s) {
      const Winner winner = next_winner(p, int(w.rows), last);
      last = winner;
      if (s == 0 && w.type == kInt8) {  // a column's first winner is its largest
        largest = largest_of_warp(winner.key);
        scale = topk::int8_scale(largest);
        inverse = topk::int8_inverse(scale);
        if (lane == 0) store_as(record, scale);
      }
      if (!first_half) continue;
      write_row(w, record, s * kLanes + column, winner.row);
      write_value(w, record, s * kLanes + column, p[winner.row * kLanes + column], largest, inverse);
    }
    if (e == nullptr) return;
    __syncwarp();      // a shuffle alone does not order what was read before what is written now
    if (first_half) {  // what is left of each winner; NaN: its residual stays
      for (int s = 0; s < w.k; ++s) {
        const int n = s * kLanes + column, i = read_row(w, record, n) * kLanes + column;
        if (w.type == kInt8 && largest >= kInfinity) p[i] = float_of(kNaN);
        else if ((bits_of(p[i]) & kMagnitude) < kInfinity) p[i] = p[i] - decoded(w, record, n, scale);
      }
    }
    __syncwarp();
    const bool aligned = is_aligned(e, 16);
    for (int i = 4 * lane; i < t.block; i += kStep) {
      Four x = load_as<Four>(p + i);
      for (int c = 0; c < 4; ++c)
        if ((bits_of(x.v[c]) & kMagnitude) >= kInfinity) x.v[c] = e[i + c];
      put_residual(e, aligned, i, r.count, x);
    }
  }

  template <class Put>
  static GC_DEVICE void mean(const Task& t, const u8* record, float* p, Put put) {
    const topk_block::Wire w = topk_block::wire(t.format);
    const float inverse = 1.0f / float(t.ranks);
    const int lane = lane_of_thread();
    for (int i = 4 * lane; i < t.block; i += kStep) store_as(p + i, Four{});
    __syncwarp();
    if (lane < kLanes) {  // a column belongs to one lane: it adds in the order of ranks
      for (i64 rank = 0; rank < t.ranks; ++rank) {
        const u8* at = record + rank * t.rank_stride;
        const float scale = w.type == kInt8 ? load_as<float>(at) : 0.0f;
        for (int s = 0; s < w.k; ++s) {
          const int n = s * kLanes + lane, row = read_row(w, at, n);
          if (row < w.rows) p[row * kLanes + lane] += decoded(w, at, n, scale) * inverse;
          else p[lane] = float_of(kNaN);
        }
      }
    }
    __syncwarp();
    for (int i = 4 * lane; i < t.block; i += kStep) put(i, load_as<Four>(p + i));
  }

  // Zeroes in e what the record sent.
  static GC_DEVICE void mask(const Task& t, const u8* record, float* e, BlockRange r) {
    const topk_block::Wire w = topk_block::wire(t.format);
    for (int n = lane_of_thread(); n < w.k * kLanes; n += kWarp) {
      const int i = read_row(w, record, n) * kLanes + n % kLanes;
      if (i < r.count) e[i] = 0.0f;
    }
  }

 private:
  struct Winner {
    u32 key;
    int row;
  };

  // Winners come by falling key, equals by rising row.
  static GC_DEVICE bool before(Winner a, Winner b) {
    return a.key > b.key || (a.key == b.key && a.row < b.row);
  }

  // The first of this lane's column behind `last`, in both of the column's lanes.
  static GC_DEVICE Winner next_winner(const float* p, int rows, Winner last) {
    const int lane = lane_of_thread(), column = lane % kLanes;
    Winner best{0, rows};  // behind every row
    for (int row = lane / kLanes; row < rows; row += 2) {
      const Winner here{order_key(bits_of(p[row * kLanes + column])), row};
      if (before(last, here) && before(here, best)) best = here;
    }
    const Winner other{__shfl_xor_sync(kAllLanes, best.key, kLanes),
                       __shfl_xor_sync(kAllLanes, best.row, kLanes)};
    return before(other, best) ? other : best;
  }

  static GC_DEVICE void write_row(const topk_block::Wire& w, u8* record, int n, int row) {
    if (w.wide) store_as(record + w.indices + 2 * n, u16(row));
    else record[w.indices + n] = u8(row);
  }
  static GC_DEVICE int read_row(const topk_block::Wire& w, const u8* record, int n) {
    return w.wide ? load_as<u16>(record + w.indices + 2 * n) : record[w.indices + n];
  }

  static GC_DEVICE void write_value(const topk_block::Wire& w, u8* record, int n, float x, u32 largest,
                                    float inverse) {
    u8* values = record + w.values;
    if (w.type == kFloat32) store_as(values + 4 * n, topk::canonical(bits_of(x)));
    else if (w.type == kFloat16) store_as(values + 2 * n, topk::saturated_f16(x));
    else values[n] = largest >= kInfinity ? u8(0) : u8(i8(topk::int8_quantum(x, inverse)));
  }
  static GC_DEVICE float decoded(const topk_block::Wire& w, const u8* record, int n, float scale) {
    const u8* values = record + w.values;
    if (w.type == kFloat32) return load_as<float>(values + 4 * n);
    if (w.type == kFloat16) return float_of_f16(load_as<u16>(values + 2 * n));
    return float(i8(values[n])) * scale;
  }
};

}  // namespace gradcomm
