// CPU loops of csrc/device/topk_sparse.cuh. A record is a chunk of many blocks, so these are loops over
// chunks in place of those of blocks.h; what a chunk sends is found by topk_select.h.
#pragma once
#include "topk_select.h"
#include "topk_values.h"

namespace gradcomm::GC_ISA {

// Where an element of block space lies in the bucket. Indices mostly come in order, so the segment of
// the last one is tried first.
class Places {
 public:
  explicit Places(const Args& a) : a_(a) {}

  // -1 for padding.
  i64 operator()(i64 element) {
    if (element < begin_ || element >= end_) {
      const i64 i = find_segment(a_.segments, a_.num_segments, element / a_.block);
      if (i < 0) return -1;
      const Segment& s = a_.segments[i];
      if (element - s.first_block * a_.block >= s.numel) return -1;
      begin_ = s.first_block * a_.block;
      end_ = begin_ + s.numel;
      offset_ = s.offset - begin_;
    }
    return element + offset_;
  }

 private:
  const Args& a_;
  i64 begin_ = 0, end_ = 0, offset_ = 0;
};

// Calls add(index, value / ranks) for every entry in use of a chunk, rank by rank.
template <class Add>
inline void for_entries(const Args& a, i64 chunk, Add add) {
  const topk_sparse::Wire w = topk_sparse::wire(a.format);
  const float inverse = 1.0f / float(a.ranks);
  for (i64 rank = 0; rank < a.ranks; ++rank) {
    const u8* record = a.payloads + rank * a.rank_stride + chunk * a.record;
    for (i64 begin = 0; begin < w.k; begin += topk_sparse::kScaled) {
      const i64 n = w.k - begin < topk_sparse::kScaled ? w.k - begin : topk_sparse::kScaled;
      float v[topk_sparse::kScaled];
      u32 index[topk_sparse::kScaled];
      read_values(w.type, record + w.values, record + begin / topk_sparse::kScaled * 4, begin, n,
                  inverse, v);
      std::memcpy(index, record + w.indices + 4 * begin, 4 * n);
      for (i64 i = 0; i < n; ++i)
        if (index[i] != topk_sparse::kUnused) add(index[i], v[i]);
    }
  }
}

// The mean of a chunk in block space.
inline void mean_of_chunk(const Args& a, i64 chunk, float* mean) {
  std::memset(mean, 0, a.span * a.block * sizeof(float));
  for_entries(a, chunk, [=](u32 index, float v) { mean[index] += v; });
}

inline void decode_mean_chunks(const Args& a, i64 begin, i64 end, float* scratch) {
  for (i64 c = begin; c < end; ++c) {
    const bool in_place = a.dtype == kFloat32;
    if (!in_place) mean_of_chunk(a, c, scratch);
    Cursor cursor(a, c * a.span);
    for (i64 b = 0; b < a.span; ++b) {
      const BlockRange r = cursor.at(c * a.span + b);
      if (r.count == 0) continue;
      if (in_place) std::memset(static_cast<float*>(a.out) + r.offset, 0, r.count * sizeof(float));
      else write_block(a, r, scratch + b * a.block);
    }
    if (!in_place) continue;
    Places places(a);
    float* out = static_cast<float*>(a.out);
    const i64 first = (a.block_begin + c * a.span) * a.block;
    for_entries(a, c, [&](u32 index, float v) {
      const i64 at = places(first + index);
      if (at >= 0) out[at] += v;
    });
  }
}

// Zeroes in args.residual what args.payloads (of one rank) sent.
inline void mask_chunks(const Args& a, i64 begin, i64 end) {
  for (i64 c = begin; c < end; ++c) {
    Places places(a);
    const i64 first = c * a.span * a.block;
    for_entries(a, c, [&](u32 index, float) {
      if (places(first + index) >= 0) a.residual[first + index] = 0.0f;
    });
  }
}

// The largest index in these records of one rank, when there is no such element; else -1.
inline i64 bad_index_in_chunks(const Args& a, const u8* payload, i64 records) {
  const topk_sparse::Wire w = topk_sparse::wire(a.format);
  u32 most = 0;  // index + 1, so that kUnused is 0
  for (i64 c = 0; c < records; ++c)
    for (i64 i = 0; i < w.k; ++i) {
      u32 index;
      std::memcpy(&index, payload + c * a.record + w.indices + 4 * i, 4);
      most = index + 1 > most ? index + 1 : most;
    }
  return i64(most) > w.elements ? i64(most) - 1 : -1;
}

// One chunk to one record.
template <bool Feedback>
void encode_chunk(ChunkReader<Feedback>& chunk, const Args& a, i64 c, Selection& selection) {
  const topk_sparse::Wire w = topk_sparse::wire(a.format);
  u8* record = a.payload + c * a.record;
  std::memset(record, 0, a.record);
  if (chunk.used() == 0) return;
  std::memset(record + w.indices, 0xff, 4 * w.k);  // kUnused
  const i64 n = select(chunk, a, selection);
  float* sent = selection.sent;
  for (i64 i = 0; i < n; ++i) {
    const u32 index = entry_index(selection.entries[i]);
    std::memcpy(record + w.indices + 4 * i, &index, 4);
    sent[i] = gradcomm::float_of(entry_bits(selection.entries[i]));
  }
  for (i64 i = 0; i < n; i += topk_sparse::kScaled) {
    const i64 some = n - i < topk_sparse::kScaled ? n - i : topk_sparse::kScaled;
    write_values(w.type, sent + i, some, record + w.values + i * wire_size(w.type),
                 record + i / topk_sparse::kScaled * 4);
  }
  if constexpr (Feedback) {
    const float* e = chunk.residual();
    for (i64 i = 0; i < n; ++i)  // NaN: the residual stays
      if (sent[i] != sent[i]) sent[i] = e[entry_index(selection.entries[i])];
    const i64 next = chunk.keep(selection.start, a.span, selection.entries, sent, 0, n);
    chunk.keep(0, selection.start, selection.entries, sent, next, n);
  }
}

inline void encode_any(const Args& a, i64 c, float gain, const float* mean, float* scratch) {
  Selection selection(a, scratch);
  if (a.residual == nullptr) {
    ChunkReader<false> chunk(a, c, gain, mean, selection.blocks);
    encode_chunk(chunk, a, c, selection);
  } else {
    ChunkReader<true> chunk(a, c, gain, mean, selection.blocks);
    encode_chunk(chunk, a, c, selection);
  }
}

inline void encode_chunks(const Args& a, i64 begin, i64 end, float* scratch) {
  for (i64 c = begin; c < end; ++c) encode_any(a, c, a.gain, nullptr, scratch);
}

inline void reduce_encode_chunks(const Args& a, i64 begin, i64 end, float* scratch) {
  float* mean = scratch + sparse_scratch_floats(a.format);
  for (i64 c = begin; c < end; ++c) {
    mean_of_chunk(a, c, mean);
    encode_any(a, c, 1.0f, mean, scratch);
  }
}

}  // namespace gradcomm::GC_ISA
