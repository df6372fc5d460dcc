// How an operator on the sparse format becomes launches. They depend on each other, in order.
//
//   encode by threshold    sample, collect, place
//   encode, exact          sample, collect, refine, refine, count, place
//   reduce_encode          decode_mean into block space, then as encode
//   decode_mean, mask      one
//
// A layout of more segments than an argument holds takes more launches before, which bring it into the
// scratch, kSegments each.
#pragma once
#include "launch.h"
#include "sparse_decode.cuh"
#include "sparse_select.cuh"

namespace gradcomm {

extern const SparseKernels topk_sparse_kernels;

constexpr i64 kFillBlocks = 64;  // of the first launch, which fills payload and scratch

inline i64 sparse_scratch_words(const Args& a, Stage stage, i64 records) {
  const Touched touched = touched_by(a, records);
  const i64 segments = touched.behind - touched.next;
  if (stage == Stage::kDecodeMean || stage == Stage::kMask) return table_words(segments);
  return scratch_words(a.format, records, segments, stage == Stage::kReduceEncode);
}

template <class Enqueue>
void for_sparse_launches(const Args& a, Stage stage, i64 records, int warps, i64 grid_most,
                         Enqueue enqueue) {
  const SparseKernels& k = topk_sparse_kernels;
  const auto ceil = [](i64 n, i64 d) { return (n + d - 1) / d; };
  Task t = task_of(a);
  t.scratch = a.scratch;
  t.slab = slab_elements(a.format);
  t.slabs = slabs_of(a.format);
  const auto launch = [&](Kernel kernel, i64 needed, i64 words) {
    const i64 grid = needed < grid_most ? needed : grid_most;
    enqueue(Launch{kernel, unsigned(grid < 1 ? 1 : grid), unsigned(warps * kWarp),
                   unsigned(words * i64(sizeof(u32)))},
            t);
  };

  const Touched touched = touched_by(a, records);
  const i64 segments = touched.behind > touched.next ? touched.behind - touched.next : 0;
  if (segments > kSegments) {
    t.table = reinterpret_cast<Segment*>(a.scratch);
    for (t.begin = 0; t.begin < segments; t.begin = t.end) {
      t.end = segments - t.begin < kSegments ? segments : t.begin + kSegments;
      put_segments(t, a.segments + touched.next + t.begin, t.end - t.begin);
      launch(k.segments, 1, 0);
    }
    t.num_segments = segments;
  } else {
    put_segments(t, a.segments + touched.next, segments);
  }
  t.begin = 0;
  t.end = records;

  i64 dtype = a.dtype;
  if (stage == Stage::kMask) return launch(k.mask, ceil(records * a.format[3], warps * kWarp), 0);
  if (stage == Stage::kDecodeMean || stage == Stage::kReduceEncode) {
    if (stage == Stage::kReduceEncode) {
      dtype = kFloat32;
      t.flat = 1;
      t.source = t.out = a.scratch + mean_begin(a.format, records, segments);
    }
    launch(k.decode_mean[dtype], records * ceil(a.block * a.span, kTileElements), kDecodeWords);
    if (stage == Stage::kDecodeMean) return;
  }
  const i64 runs = records * ceil(t.slabs, warps);
  launch(k.sample[dtype], records > kFillBlocks ? records : kFillBlocks, kSampleWords);
  launch(k.collect[dtype], runs, kDigitWords);
  if (a.format[5] == topk_sparse::kExact) {
    for (t.step = 1; t.step < kDigits; ++t.step) launch(k.refine[dtype], runs, kDigitWords);
    launch(k.count[dtype], runs, kPlaceWords);
  }
  launch(k.place[dtype], runs, kPlaceWords);
}

// Whether this format has kernels here.
inline bool has_kernels_for(const i64* format) {
  return format[0] == kTopKSparse || kernels_of(format) != nullptr;
}

// Calls enqueue(Launch, Task) for each launch of an operator, in order. `warps`, 0 for as many as is
// right, and `grid_most`: of a thread block, and thread blocks of a launch.
template <class Enqueue>
void for_launches(const Args& a, Stage stage, i64 records, int warps, i64 grid_most, Enqueue enqueue) {
  if (a.format[0] == kTopKSparse)
    return for_sparse_launches(a, stage, records, warps > 0 ? warps : kWarpsMost, grid_most, enqueue);
  for_block_launches(a, stage, records, warps > 0 ? warps : warps_of(a.block), grid_most, enqueue);
}

inline i64 words_of_scratch(const Args& a, Stage stage, i64 records) {
  return a.format[0] == kTopKSparse ? sparse_scratch_words(a, stage, records) : 0;
}

}  // namespace gradcomm
