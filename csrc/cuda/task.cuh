// What a kernel is told. One struct, so that every way to launch (CUDA, NVRTC, emulator) passes one
// argument; gradcomm/ops/nvrtc.py spells the same struct for Python.
#pragma once
#include "../device/format.cuh"
#include "../device/layout.cuh"
#include "target.cuh"

namespace gradcomm {

// The segments travel inside the argument: no copy of the table to the device, so nothing to wait
// for, to keep alive or to capture in a graph. 4 KiB is what an argument may have everywhere; a
// bucket of more segments takes more launches (launch.h).
constexpr int kSegments = 120;

struct Task {
  i64 format[6];
  i64 block, record;  // elements of a block, bytes of a record
  i64 block_begin;    // the layout's block that record 0 stands for
  i64 begin, end;     // the records of this launch
  i64 ranks, rank_stride;
  u64 key;             // of the random numbers
  const void* source;  // encode: the bucket
  void* out;           // decode_mean: the bucket
  const float* gain;   // encode: one float, or null for 1
  float* residual;     // block space from record 0 on, or null
  u8* payload;         // written by encode and reduce_encode
  const u8* payloads;  // read by decode_mean and reduce_encode
  // Of the sparse format alone (sparse_scratch.cuh).
  u32* scratch;     // what its launches leave to one another
  Segment* table;   // all segments, where they are more than kSegments; else null
  i64 slab, slabs;  // elements of a slab, and slabs of a record
  i64 step;         // refine: which digit
  i64 flat;         // whether the bucket lies in block space from record 0 on, as a mean does
  i64 num_segments;
  Segment segments[kSegments];
};
static_assert(sizeof(Task) <= 4096, "more than an argument may have");

}  // namespace gradcomm
