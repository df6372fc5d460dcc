// How an operator becomes launches: which kernel, how many threads, which part of the layout. The
// same for CUDA and for the emulator; nothing of CUDA's host API is in it.
#pragma once
#include <cstring>

#include "kernels.cuh"
#include "run.h"

namespace gradcomm {

extern const Kernels cast_kernels, onebit_kernels, quantize2_kernels, quantize4_kernels,
    quantize8_kernels, topk_block_kernels, twobit_kernels;

constexpr i64 kBlocksPerProcessor = 32;    // of a launch; each then takes several blocks of its format
constexpr i64 kTileBytesMost = 48 * 1024;  // of shared memory, without asking for more

// Of a format whose record is a block; null where the block is more than shared memory holds.
inline const Kernels* kernels_of(const i64* format) {
  if (format[1] * i64(sizeof(float)) > kTileBytesMost) return nullptr;
  switch (format[0]) {
    case kCast: return &cast_kernels;
    case kOneBit: return &onebit_kernels;
    case kQuantize:
      return format[2] == 2   ? &quantize2_kernels
             : format[2] == 4 ? &quantize4_kernels
                              : &quantize8_kernels;
    case kTopKBlock: return &topk_block_kernels;
    case kTwoBit: return &twobit_kernels;
    default: return nullptr;
  }
}

inline Kernel kernel_of(const Kernels& k, Stage stage, i64 dtype) {
  switch (stage) {
    case Stage::kEncode: return k.encode[dtype];
    case Stage::kDecodeMean: return k.decode_mean[dtype];
    case Stage::kReduceEncode: return k.reduce_encode;
    default: return k.mask;
  }
}

// Warps of a thread block: each has a tile of one block of the format.
inline int warps_of(i64 block) {
  const i64 fit = kTileBytesMost / 2 / (block * i64(sizeof(float)));
  return int(fit < 1 ? 1 : fit < kWarpsMost ? fit : kWarpsMost);
}

struct Launch {
  Kernel kernel;
  unsigned grid, threads, shared_bytes;
};

// The task of all launches of an operator, but for the records and the segments.
inline Task task_of(const Args& a) {
  Task t{};
  std::memcpy(t.format, a.format, sizeof(t.format));
  t.block = a.block;
  t.record = a.record;
  t.block_begin = a.block_begin;
  t.ranks = a.ranks;
  t.rank_stride = a.rank_stride;
  t.key = a.key;
  t.source = a.source;
  t.out = a.out;
  t.gain = a.gain_at;
  t.residual = a.residual;
  t.payload = a.payload;
  t.payloads = a.payloads;
  return t;
}

// The segments [next, behind) that the records touch.
struct Touched {
  i64 next, behind;
};
inline Touched touched_by(const Args& a, i64 records) {
  const i64 next = find_segment(a.segments, a.num_segments, a.block_begin);
  const i64 last = a.block_begin + records * a.span - 1;
  return {next < 0 ? 0 : next, find_segment(a.segments, a.num_segments, last) + 1};
}

inline void put_segments(Task& t, const Segment* segments, i64 count) {
  t.num_segments = count;
  if (count > 0) std::memcpy(t.segments, segments, count * sizeof(Segment));
}

// Calls enqueue(Launch, Task) for each launch, in order; they do not depend on each other. `warps`
// and `grid_most`: of a thread block, and thread blocks of a launch.
template <class Enqueue>
void for_block_launches(const Args& a, Stage stage, i64 records, int warps, i64 grid_most,
                        Enqueue enqueue) {
  const Kernel kernel = kernel_of(*kernels_of(a.format), stage, a.dtype);
  Task t = task_of(a);
  auto [next, behind] = touched_by(a, records);
  while (t.end < records) {
    const i64 left = behind - next;
    put_segments(t, a.segments + next, left < 0 ? 0 : left < kSegments ? left : kSegments);
    next += t.num_segments;
    t.begin = t.end;
    t.end = next < behind ? a.segments[next].first_block - a.block_begin : records;
    const i64 needed = (t.end - t.begin + warps - 1) / warps;
    const i64 grid = needed < grid_most ? needed : grid_most;
    enqueue(Launch{kernel, unsigned(grid), unsigned(warps * kWarp),
                   unsigned(warps * a.block * i64(sizeof(float)))},
            t);
  }
}

}  // namespace gradcomm
