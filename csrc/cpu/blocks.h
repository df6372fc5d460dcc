// The three loops over blocks, for any block format. A format is a struct with
//
//   template <bool Feedback>
//   void encode(const float* g, float gain, float* e, u8* record, i64 count, u64 counter);
//       one block: p = gain * g + e; write the record; with Feedback e <- p - decoded(p), and e stays
//       as it is where p is not finite. g and e hold a whole block, zero from count on; what this
//       writes to e from count on is wiped by the caller. `counter` is that of its first element's
//       random number.
//   template <bool First, bool Last>
//   void decode(const u8* record, float* sum, float inverse);
//       sum = (First ? 0 : sum) + decoded, and Last multiplies by inverse: the mean.
//
// A block stays in the first-level cache between its passes; that is where the speed comes from.
#pragma once
#include "loops.h"
#include "simd.h"

namespace gradcomm::GC_ISA {

// The block as floats, zero behind its count: in place when it can be, else in `buffer`.
inline const float* read_block(const Args& a, BlockRange r, float* buffer) {
  if (a.dtype == kFloat32) {
    const float* source = static_cast<const float*>(a.source) + r.offset;
    if (r.count == a.block) return source;
    std::memcpy(buffer, source, r.count * sizeof(float));
  } else {
    const u16* source = static_cast<const u16*>(a.source) + r.offset;
    const i64 whole = r.count / kLanes * kLanes;
    if (a.dtype == kFloat16) {
      for (i64 i = 0; i < whole; i += kLanes) store(buffer + i, float_of_f16(load<u16x16>(source + i)));
      for (i64 i = whole; i < r.count; ++i) buffer[i] = gradcomm::float_of_f16(source[i]);
    } else {
      for (i64 i = 0; i < whole; i += kLanes) store(buffer + i, float_of_bf16(load<u16x16>(source + i)));
      for (i64 i = whole; i < r.count; ++i) buffer[i] = gradcomm::float_of_bf16(source[i]);
    }
  }
  if (r.count < a.block) std::memset(buffer + r.count, 0, (a.block - r.count) * sizeof(float));
  return buffer;
}

inline bool writes_in_place(const Args& a, BlockRange r) {
  return a.dtype == kFloat32 && r.count == a.block;
}

inline void write_block(const Args& a, BlockRange r, const float* buffer) {
  if (a.dtype == kFloat32) {
    std::memcpy(static_cast<float*>(a.out) + r.offset, buffer, r.count * sizeof(float));
    return;
  }
  u16* out = static_cast<u16*>(a.out) + r.offset;
  const i64 whole = r.count / kLanes * kLanes;
  if (a.dtype == kFloat16) {
    for (i64 i = 0; i < whole; i += kLanes) store(out + i, f16_of_float(load<f32x16>(buffer + i)));
    for (i64 i = whole; i < r.count; ++i) out[i] = gradcomm::f16_of_float(buffer[i]);
  } else {
    for (i64 i = 0; i < whole; i += kLanes) store(out + i, bf16_of_float(load<f32x16>(buffer + i)));
    for (i64 i = whole; i < r.count; ++i) out[i] = gradcomm::bf16_of_float(buffer[i]);
  }
}

// Walks the layout block by block.
class Cursor {
 public:
  Cursor(const Args& a, i64 begin)
      : a_(a), segment_(find_segment(a.segments, a.num_segments, a.block_begin + begin)) {}

  BlockRange at(i64 index) {
    const i64 b = a_.block_begin + index;
    while (segment_ + 1 < a_.num_segments && a_.segments[segment_ + 1].first_block <= b) ++segment_;
    if (segment_ < 0) return BlockRange{0, 0, 0};
    return block_in_segment(a_.segments[segment_], b, a_.block);
  }

 private:
  const Args& a_;
  i64 segment_;
};

template <class Format>
void encode_one(Format& format, const Args& a, const float* g, float gain, i64 index, BlockRange r) {
  u8* record = a.payload + index * a.record;
  if (a.residual == nullptr) {
    format.template encode<false>(g, gain, nullptr, record, r.count, r.counter);
    return;
  }
  float* e = a.residual + index * a.block;
  format.template encode<true>(g, gain, e, record, r.count, r.counter);
  if (r.count < a.block) std::memset(e + r.count, 0, (a.block - r.count) * sizeof(float));
}

template <class Format>
void mean_of_one(Format& format, const Args& a, i64 index, float* sum) {
  const float inverse = 1.0f / float(a.ranks);
  const u8* record = a.payloads + index * a.record;
  if (a.ranks == 1) {
    format.template decode<true, true>(record, sum, inverse);
    return;
  }
  format.template decode<true, false>(record, sum, inverse);
  for (i64 r = 1; r < a.ranks - 1; ++r)
    format.template decode<false, false>(record + r * a.rank_stride, sum, inverse);
  format.template decode<false, true>(record + (a.ranks - 1) * a.rank_stride, sum, inverse);
}

template <class Format>
void encode_blocks(const Args& a, i64 begin, i64 end, float* scratch) {
  Format format(a, scratch + a.block);
  Cursor cursor(a, begin);
  for (i64 b = begin; b < end; ++b) {
    const BlockRange r = cursor.at(b);
    if (r.count == 0) std::memset(a.payload + b * a.record, 0, a.record);
    else encode_one(format, a, read_block(a, r, scratch), a.gain, b, r);
  }
}

template <class Format>
void decode_mean_blocks(const Args& a, i64 begin, i64 end, float* scratch) {
  Format format(a, scratch + a.block);
  Cursor cursor(a, begin);
  for (i64 b = begin; b < end; ++b) {
    const BlockRange r = cursor.at(b);
    if (r.count == 0) continue;
    if (writes_in_place(a, r)) {
      mean_of_one(format, a, b, static_cast<float*>(a.out) + r.offset);
    } else {
      mean_of_one(format, a, b, scratch);
      write_block(a, r, scratch);
    }
  }
}

// What the owner of a shard does: the mean of its chunk over all ranks, encoded again.
template <class Format>
void reduce_encode_blocks(const Args& a, i64 begin, i64 end, float* scratch) {
  Format format(a, scratch + a.block);
  Cursor cursor(a, begin);
  for (i64 b = begin; b < end; ++b) {
    const BlockRange r = cursor.at(b);
    if (r.count == 0) {
      std::memset(a.payload + b * a.record, 0, a.record);
      continue;
    }
    mean_of_one(format, a, b, scratch);
    if (r.count < a.block) std::memset(scratch + r.count, 0, (a.block - r.count) * sizeof(float));
    encode_one(format, a, scratch, 1.0f, b, r);
  }
}

}  // namespace gradcomm::GC_ISA
