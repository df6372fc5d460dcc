// What the launches of the sparse top-k leave to one another, in memory that the caller lends.
//
// A record's elements are cut into slabs of one length, the unit of a warp's work, numbered from the
// block that the record begins with (topk_sparse.cuh: start_block; 0 when exact). Nothing that a slab
// leaves depends on which warp took it, and sums are of integers: the bytes are the same at any launch
// size. The scratch of a launch is, in 32-bit words,
//
//   table    8 * segments         only where these are more than an argument holds
//   state    of each record       struct SparseState
//   mean     elements             reduce_encode only: the float32 mean in block space, 16-byte aligned
#pragma once
#include "../device/topk_sparse.cuh"
#include "task.cuh"

namespace gradcomm {

constexpr i64 kSlabLeast = 1024, kSlabsMost = 4096;
constexpr i64 kSlabUnit = 128;  // a warp's step
constexpr int kDigits = 3;      // of an order_key, the highest first: 11, 10 and 10 bits
constexpr i64 kBins = 2048 + 1024 + 1024;

// Where a digit's histogram begins, how many bits are below it, and how many bins it has.
GC_INLINE constexpr int bins_before(int digit) { return digit == 0 ? 0 : 1024 * (digit + 1); }
GC_INLINE constexpr int shift_of(int digit) { return 20 - 10 * digit; }
GC_INLINE constexpr int bins_of(int digit) { return digit == 0 ? 2048 : 1024; }

GC_INLINE i64 slab_elements(const i64* format) {
  const i64 even = (format[1] * format[2] + kSlabsMost - 1) / kSlabsMost;
  return ((even > kSlabLeast ? even : kSlabLeast) + kSlabUnit - 1) / kSlabUnit * kSlabUnit;
}
GC_INLINE i64 slabs_of(const i64* format) {
  const i64 slab = slab_elements(format);
  return (format[1] * format[2] + slab - 1) / slab;
}

// The state of a record: where its parts begin, in words.
struct SparseState {
  i64 passed;     // 1: elements from the sampled threshold up
  i64 bins;       // exact only: kBins, the histograms of the three digits
  i64 groups;     // entries that are in place, of each kScaled that share a scale
  i64 zeroed;     // the words up to here begin as 0
  i64 threshold;  // 1: sampled
  i64 used;       // 1: elements in use
  i64 above;      // of each slab: elements over the threshold, or from it up
  i64 equal;      // of each slab: elements at the threshold, or those that are not finite
  i64 found;      // exact only, of each slab: elements from the sampled threshold up
  i64 keys;       // exact only, of each slab: the order_keys of the first `held` of those
  i64 sent;       // k values as they are in p
  i64 words;      // of all
  i64 held;
};

GC_INLINE SparseState sparse_state(const i64* format) {
  const bool exact = format[5] == topk_sparse::kExact;
  const i64 k = format[3], slabs = slabs_of(format);
  SparseState s{};
  s.bins = 1;
  s.groups = s.bins + (exact ? kBins : 0);
  s.zeroed = s.groups + (k + topk_sparse::kScaled - 1) / topk_sparse::kScaled;
  s.threshold = s.zeroed;
  s.used = s.threshold + 1;
  s.above = s.used + 1;
  s.equal = s.above + slabs;
  s.found = s.equal + slabs;
  s.keys = s.found + (exact ? slabs : 0);
  s.held = exact ? slab_elements(format) / 8 : 0;
  s.sent = s.keys + slabs * s.held;
  s.words = s.sent + k;
  return s;
}

// Words of scratch: of the table, and of all.
GC_INLINE i64 table_words(i64 segments) {
  return segments > kSegments ? segments * i64(sizeof(Segment) / sizeof(u32)) : 0;
}
GC_INLINE i64 mean_begin(const i64* format, i64 records, i64 segments) {
  return (table_words(segments) + records * sparse_state(format).words + 3) / 4 * 4;
}
GC_INLINE i64 scratch_words(const i64* format, i64 records, i64 segments, bool mean) {
  return mean_begin(format, records, segments) + (mean ? records * format[1] * format[2] : 0);
}

}  // namespace gradcomm
