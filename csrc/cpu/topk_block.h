// CPU loops of csrc/device/topk_block.cuh.
#pragma once
#include "../device/topk_block.cuh"
#include "blocks.h"
#include "topk_values.h"

namespace gradcomm::GC_ISA {

// The largest key of each lane and its row, the first of equals. Written around the maximum, so that
// from row to row a maximum is all that has to be waited for.
struct Best {
  i32n key = i32n{} - 1, row{};

  GC_INLINE void see(i32n other, i32n its_row) {
    const i32n most = max(key, other);
    row = most != key ? its_row : row;
    key = most;
  }
};

// The rows of winner s of all lanes.
inline u32x16 winner_rows(const topk_block::Wire& w, const u8* record, i64 s) {
  const u8* at = record + w.indices + s * kLanes * (w.wide ? 2 : 1);
  return w.wide ? convert<u32x16>(load<u16x16>(at)) : convert<u32x16>(load<u8x16>(at));
}

class TopKBlock {
 public:
  TopKBlock(const Args& a, float* scratch)
      : wire_(topk_block::wire(a.format)),
        block_(a.block),
        p_(scratch),
        keys_(reinterpret_cast<i32*>(scratch + a.block)),
        sent_(scratch + 2 * a.block) {}

  template <bool Feedback>
  void encode(const float* g, float gain, float* e, u8* record, i64, u64) {
    if (wire_.k == 1 && select_one<Feedback>(g, gain, e, record)) return;
    select_many<Feedback>(g, gain, e, record);
  }

  template <bool First, bool>
  void decode(const u8* record, float* sum, float inverse) {
    if constexpr (First) std::memset(sum, 0, block_ * sizeof(float));
    for (i64 s = 0; s < wire_.k; ++s) {
      float v[kLanes];
      u32 row[kLanes];
      read_values(wire_.type, record + wire_.values, record, s * kLanes, kLanes, inverse, v);
      store(row, winner_rows(wire_, record, s));
      for (int l = 0; l < kLanes; ++l) sum[row[l] * kLanes + l] += v[l];
    }
  }

 private:
  // k = 1 in one pass: e becomes p while the winners are found, and the old e is kept aside for the
  // rare tile with a non-finite element, which is put back and left to select_many.
  template <bool Feedback>
  bool select_one(const float* g, float gain, float* e, u8* record) {
    const i64 block = block_;
    float* const old_e = p_;
    i32 row[kLanes], most = 0;
    for (int lane = 0; lane < kLanes; lane += kWidth) {
      Best best;
      i32n r{};
      for (i64 i = lane; i < block; i += kLanes, r += 1) {
        f32n x = load<f32n>(g + i) * gain;
        if constexpr (Feedback) {
          const f32n old = load<f32n>(e + i);
          x = x + old;
          store(old_e + i, old);
          store(e + i, x);
        }
        best.see(magnitude(x), r);
      }
      store(row + lane, best.row);
      const i32 m = largest(best.key);
      most = m > most ? m : most;
    }
    if (most >= i32(kInfinity)) {
      if constexpr (Feedback) std::memcpy(e, old_e, block * sizeof(float));
      return false;
    }
    for (int l = 0; l < kLanes; ++l) {
      const i64 i = row[l] * kLanes + l;
      sent_[l] = Feedback ? e[i] : g[i] * gain;
    }
    write_rows(record, 0, row);
    write_values(wire_.type, sent_, kLanes, record + wire_.values, record);
    if constexpr (Feedback)
      for (int l = 0; l < kLanes; ++l) e[row[l] * kLanes + l] = sent_[l];
    return true;
  }

  // Any k, any input: k rounds over the keys of the tile, each taking the largest that is left.
  template <bool Feedback>
  void select_many(const float* g, float gain, float* e, u8* record) {
    const i64 block = block_;
    float* const p = p_;
    i32* const keys = keys_;
    for (i64 i = 0; i < block; i += kWidth) {
      f32n x = load<f32n>(g + i) * gain;
      if constexpr (Feedback) x = x + load<f32n>(e + i);
      store(p + i, x);
      store(keys + i, order_key(x));
    }
    for (i64 s = 0; s < wire_.k; ++s) {
      i32 row[kLanes];
      for (int lane = 0; lane < kLanes; lane += kWidth) {
        Best best;
        i32n r{};
        for (i64 i = lane; i < block; i += kLanes, r += 1) best.see(load<i32n>(keys + i), r);
        store(row + lane, best.row);
      }
      write_rows(record, s, row);
      for (int l = 0; l < kLanes; ++l) {
        const i64 i = i64(row[l]) * kLanes + l;
        sent_[s * kLanes + l] = p[i];
        keys[i] = -1;  // taken
      }
    }
    write_values(wire_.type, sent_, wire_.k * kLanes, record + wire_.values, record);
    if constexpr (Feedback) {
      for (i64 s = 0; s < wire_.k; ++s) {
        u32 row[kLanes];
        store(row, winner_rows(wire_, record, s));
        for (int l = 0; l < kLanes; ++l) p[i64(row[l]) * kLanes + l] = sent_[s * kLanes + l];
      }
      for (i64 i = 0; i < block; i += kWidth)  // e stays where p is not finite
        store(e + i, finite_or(load<f32n>(p + i), load<f32n>(e + i)));
    }
  }

  void write_rows(u8* record, i64 s, const i32* rows) const {
    u8* at = record + wire_.indices + s * kLanes * (wire_.wide ? 2 : 1);
    const i32x16 row = load<i32x16>(rows);
    if (wire_.wide) store(at, convert<u16x16>(row));
    else store(at, convert<u8x16>(row));
  }

  topk_block::Wire wire_;
  i64 block_;
  float* p_;  // the tile's p, or its old e while select_one runs
  i32* keys_;
  float* sent_;  // k rows of winners
};

// Zeroes in args.residual what args.payloads (of one rank) sent.
inline void mask_blocks(const Args& a, i64 begin, i64 end) {
  const topk_block::Wire w = topk_block::wire(a.format);
  Cursor cursor(a, begin);
  for (i64 b = begin; b < end; ++b) {
    const BlockRange r = cursor.at(b);
    if (r.count == 0) continue;
    for (i64 s = 0; s < w.k; ++s) {
      u32 row[kLanes];
      store(row, winner_rows(w, a.payloads + b * a.record, s));
      for (int l = 0; l < kLanes; ++l) {
        const i64 i = i64(row[l]) * kLanes + l;
        if (i < r.count) a.residual[b * a.block + i] = 0.0f;
      }
    }
  }
}

// The largest row in these records of one rank, when there is no such row; else -1.
inline i64 bad_row(const Args& a, const u8* payload, i64 records) {
  const topk_block::Wire w = topk_block::wire(a.format);
  u32x16 most{};
  for (i64 b = 0; b < records; ++b)
    for (i64 s = 0; s < w.k; ++s) most = max(most, winner_rows(w, payload + b * a.record, s));
  const i64 row = largest(most);
  return row < w.rows ? -1 : row;
}

}  // namespace gradcomm::GC_ISA
