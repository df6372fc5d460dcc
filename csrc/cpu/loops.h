// What the bindings call: loops over records, once for each instruction set. `select()` picks
// the widest that this processor has.
#pragma once
#include "../device/format.cuh"
#include "../device/layout.cuh"

namespace gradcomm {

constexpr int kFormatInts = 6;

// Everything a loop needs. The caller has checked every length, offset and type.
struct Args {
  i64 format[kFormatInts];  // family, block, options of the family
  i64 block;                // elements of block space in a block
  i64 record;               // bytes of a record
  i64 span = 1;             // blocks that a record stands for: 1, or the whole chunk (sparse format)
  const Segment* segments;
  i64 num_segments;
  i64 block_begin = 0;  // the layout's block that the payload's first record stands for

  const void* source = nullptr;  // encode: the bucket
  void* out = nullptr;           // decode_mean: the bucket
  i64 dtype = kFloat32;          // of source or out, a WireType
  float gain = 1.0f;             // encode: p = gain * g + e
  float* residual = nullptr;     // in block space from block_begin on; null without error feedback
  u8* payload = nullptr;         // written by encode and reduce_encode
  u64 key = 0;                   // of the random numbers

  const u8* payloads = nullptr;  // read by decode_mean and reduce_encode
  i64 ranks = 0;
  i64 rank_stride = 0;  // bytes from one rank's payload to the next
};

// Records [begin, end) count from the payload's first; scratch holds scratch_floats(args).
using RecordLoop = void (*)(const Args&, i64 begin, i64 end, float* scratch);

i64 scratch_floats(const Args& a);

// For the sparse format: how many candidates a selection keeps, and the scratch of one encoding.
i64 sparse_candidates(const i64* format);
i64 sparse_scratch_floats(const i64* format);

// Formats that send indices are checked by this before anything is written: the largest index in the
// first `records` records of one rank's payload, if it is out of bounds, else -1.
using IndexCheck = i64 (*)(const Args&, const u8* payload, i64 records);

struct Loops {
  const char* name;
  RecordLoop encode, decode_mean, reduce_encode;
  RecordLoop mask;  // top-k: zero in args.residual what args.payloads (of one rank) sent
  IndexCheck bad_index;
};

const Loops& select();

}  // namespace gradcomm
