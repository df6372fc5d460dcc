// What the checked arguments of an operator become (checks.h), for the loops of csrc/cpu and the
// launches of csrc/cuda.
#pragma once
#include "device/format.cuh"
#include "device/layout.cuh"

namespace gradcomm {

constexpr int kFormatInts = 6;

// Everything that a loop or a launch needs. The caller has checked every length, offset and type.
struct Args {
  i64 format[kFormatInts];  // family, block, options of the family
  i64 block;                // elements of block space in a block
  i64 record;               // bytes of a record
  i64 span = 1;             // blocks that a record stands for: 1, or the whole chunk (sparse format)
  const Segment* segments;
  i64 num_segments;
  i64 block_begin = 0;  // the layout's block that the payload's first record stands for

  const void* source = nullptr;    // encode: the bucket
  void* out = nullptr;             // decode_mean: the bucket
  i64 dtype = kFloat32;            // of source or out, a WireType
  float gain = 1.0f;               // encode on the CPU: p = gain * g + e
  const float* gain_at = nullptr;  // the same on the source's device; null for 1
  float* residual = nullptr;       // in block space from block_begin on; null without error feedback
  u8* payload = nullptr;           // written by encode and reduce_encode
  u64 key = 0;                     // of the random numbers

  const u8* payloads = nullptr;  // read by decode_mean and reduce_encode
  i64 ranks = 0;
  i64 rank_stride = 0;  // bytes from one rank's payload to the next

  u32* scratch = nullptr;  // on CUDA: what csrc/cuda/run.h says that the launches need
};

}  // namespace gradcomm
