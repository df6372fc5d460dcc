// The three loops over blocks, for any block format: one warp a block, block-strided, so that any
// launch size is right. A format is a struct with
//
//   static void encode(const Task&, const float* p, float* e, u8* record, BlockRange);
//       one block, p being in shared memory and zero (or zero times gain, plus e) behind the count:
//       writes the record and, unless e is null, e <- p - decoded(p); e stays where p is not
//       finite, and becomes zero behind the count. It may change p.
//   template <class Put>
//   static void mean(const Task&, const u8* record, float* p, Put put);
//       the mean over ranks, the record being rank 0's: put(i, values) of elements i to i + 3. p is
//       a tile to work in; put may write to p where it has put.
//
// Payloads, and so records, begin at a multiple of 4 bytes: the caller has checked it.
#pragma once
#include "warp.cuh"

namespace gradcomm {

// Calls visit(record number, its range, the warp's tile) for each record of this warp.
template <class Visit>
GC_DEVICE void for_records(const Task& t, Visit visit) {
  GC_SHARED(Four, tiles);
  const int warps = int(blockDim.x) / kWarp, warp = int(threadIdx.x) / kWarp;
  float* const tile = reinterpret_cast<float*>(tiles) + warp * t.block;
  for (i64 b = t.begin + i64(blockIdx.x) * warps + warp; b < t.end; b += i64(gridDim.x) * warps) {
    const i64 place = t.block_begin + b;
    const i64 s = find_segment(t.segments, t.num_segments, place);
    BlockRange r{0, 0, 0};
    if (s >= 0) r = block_in_segment(t.segments[s], place, t.block);
    visit(b, r, tile);
    __syncwarp();  // before the tile is written again
  }
}

template <class Format, i64 Type>
GC_DEVICE void encode_blocks(const Task& t) {
  for_records(t, [&](i64 b, BlockRange r, float* p) {
    u8* record = t.payload + b * t.record;
    if (r.count == 0) {
      zero_record(record, t.record);
      return;
    }
    float* e = t.residual == nullptr ? nullptr : t.residual + b * t.block;
    read_tile<Type>(t, r, e, p);
    __syncwarp();
    Format::encode(t, p, e, record, r);
  });
}

template <class Format, i64 Type>
GC_DEVICE void decode_mean_blocks(const Task& t) {
  using E = Element<Type>;
  for_records(t, [&](i64 b, BlockRange r, float* p) {
    if (r.count == 0) return;
    auto* out = static_cast<typename E::Stored*>(t.out) + r.offset;
    const bool direct = r.count == t.block && is_aligned(out, sizeof(typename E::StoredFour));
    Format::mean(t, t.payloads + b * t.record, p, [&](int i, Four x) {
      if (!direct) {
        store_as(p + i, x);
        return;
      }
      typename E::StoredFour y;
      for (int c = 0; c < 4; ++c) y.v[c] = E::write(x.v[c]);
      store_as(out + i, y);
    });
    if (direct) return;
    __syncwarp();
    for (int i = lane_of_thread(); i < r.count; i += kWarp) out[i] = E::write(p[i]);
  });
}

// What the owner of a shard does: the mean of its chunk over all ranks, encoded again.
template <class Format>
GC_DEVICE void reduce_encode_blocks(const Task& t) {
  for_records(t, [&](i64 b, BlockRange r, float* p) {
    u8* record = t.payload + b * t.record;
    if (r.count == 0) {
      zero_record(record, t.record);
      return;
    }
    float* e = t.residual == nullptr ? nullptr : t.residual + b * t.block;
    const bool aligned = is_aligned(e, 16);
    Format::mean(t, t.payloads + b * t.record, p, [&](int i, Four x) {
      Four old{};
      if (e != nullptr) old = get_residual(e, aligned, i);
      for (int c = 0; c < 4; ++c) {
        x.v[c] = i + c < r.count ? x.v[c] : 0.0f;
        if (e != nullptr) x.v[c] = x.v[c] + old.v[c];
      }
      store_as(p + i, x);
    });
    __syncwarp();
    Format::encode(t, p, e, record, r);
  });
}

// Formats that send some of a block's elements: zeroes in the residual what the payload sent.
template <class Format>
GC_DEVICE void mask_blocks(const Task& t) {
  for_records(t, [&](i64 b, BlockRange r, float*) {
    if (r.count > 0) Format::mask(t, t.payloads + b * t.record, t.residual + b * t.block, r);
  });
}

}  // namespace gradcomm
