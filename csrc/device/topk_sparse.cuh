// Sparse top-k: the k largest magnitudes of a whole chunk (Aji & Heafield 2017), or those over a
// sampled threshold (Lin et al. 2018, "Deep Gradient Compression", section 3.1 and appendix).
//
// One record stands for a chunk of `span` blocks, E = span * block elements. Record:
//   float32 scale[ceil(k / 256)]   int8 values only; entries 256 i to 256 i + 255 share scale i
//   u32     index[k]               in the chunk's block space; kUnused for an entry that is not used
//   value   values[k]              0 for an entry that is not used
//   zeros up to a multiple of 4 bytes
// Used entries come first. Only elements in use (inside a segment) are sent; the record of a chunk that
// has none is all zeros.
//
// exact: the min(k, elements in use) largest by order_key, ties to the smallest index, in the order
// of their index.
//
// threshold: the sample is the elements in use at 0, s, 2 s, ... below E, s = (E / 4096) | 1 (odd, so
// that it meets every lane). Of n sampled elements, u elements in use and q = min(k, u), the threshold
// is the ceil(q n / u)-th largest order_key of the sample, at least 1. A chunk that holds a non-finite
// element takes Inf for its threshold, so that no quota hides it. Entries are the first k elements
// from the threshold up, in the order of their index from block start_block on, then from block 0.
#pragma once
#include "topk_values.cuh"

namespace gradcomm::topk_sparse {

enum Select : i64 { kExact = 0, kThreshold = 1 };

constexpr u32 kUnused = 0xffffffffu;
constexpr i64 kScaled = 256;  // entries that share a scale
constexpr i64 kSample = 4096;
constexpr i64 kSampleMost = 2 * kSample;
constexpr i64 kElementsMost = i64(1) << 31;

struct Wire {
  i64 elements, k, type;
  i64 indices, values, bytes;  // where the parts begin, and the end
};

GC_INLINE Wire wire(const i64* format) {
  Wire w{format[1] * format[2], format[3], format[4], 0, 0, 0};
  w.indices = w.type == kInt8 ? 4 * ((w.k + kScaled - 1) / kScaled) : 0;
  w.values = w.indices + 4 * w.k;
  w.bytes = (w.values + w.k * wire_size(w.type) + 3) / 4 * 4;
  return w;
}

GC_INLINE i64 sample_stride(i64 elements) { return (elements / kSample) | 1; }

// Which of `sampled` keys, the largest being the first, stands for the `wanted` of `used` elements.
GC_INLINE i64 sample_rank(i64 sampled, i64 wanted, i64 used) {
  return (wanted * sampled + used - 1) / used;
}

GC_INLINE i64 start_block(u64 key, u64 first_element, i64 span) {
  return i64(random_bits(random_key(key, first_element), 0u) % u32(span));
}

GC_INLINE const char* fault(const i64* format) {
  const i64 block = format[1], span = format[2];
  if (block < kLanes || block > (1 << 20) || block % kLanes != 0)
    return "topk_sparse needs a block from 16 to 2^20 that 16 divides";
  if (span < 1 || span > kElementsMost / block)
    return "topk_sparse needs a chunk of 1 block to 2^31 elements";
  if (format[3] < 1 || format[3] > block * span)
    return "topk_sparse needs a k from 1 to its chunk's elements";
  if (format[5] != kExact && format[5] != kThreshold)
    return "topk_sparse selects exact (0) or by threshold (1)";
  return topk::is_value_type(format[4]) ? nullptr : "topk_sparse values are float32, float16 or int8";
}

}  // namespace gradcomm::topk_sparse
