// One look-up for all formats: how long a record is, and what is wrong with a format.
#pragma once
#include "cast.cuh"
#include "onebit.cuh"
#include "quantize.cuh"
#include "topk_block.cuh"
#include "topk_sparse.cuh"
#include "twobit.cuh"

namespace gradcomm {

GC_INLINE i64 record_bytes(const i64* format) {
  switch (format[0]) {
    case kCast: return cast::record_bytes(format[1], format[2]);
    case kOneBit: return onebit::record_bytes(format[1]);
    case kQuantize: return quantize::record_bytes(format[1], format[2], format[3] != 0);
    case kTopKBlock: return topk_block::wire(format).bytes;
    case kTopKSparse: return topk_sparse::wire(format).bytes;
    case kTwoBit: return twobit::record_bytes(format[1]);
    default: return 0;
  }
}

// Blocks that a record stands for.
GC_INLINE i64 record_span(const i64* format) { return format[0] == kTopKSparse ? format[2] : 1; }

// Whether the records hold indices, and below what they must be. Decoders check them first.
GC_INLINE bool sends_indices(const i64* format) {
  return format[0] == kTopKBlock || format[0] == kTopKSparse;
}
GC_INLINE i64 index_bound(const i64* format) {
  return format[0] == kTopKBlock ? format[2] : format[1] * format[2];
}

// Null when the integers describe a format, else what is wrong with them.
GC_INLINE const char* format_fault(const i64* format) {
  const i64 block = format[1];
  switch (format[0]) {
    case kCast: return cast::fault(block, format[2]);
    case kOneBit:
      return block >= 128 && block <= 4096 && block % 128 == 0
                 ? nullptr
                 : "onebit needs a block from 128 to 4096 that 128 divides";
    case kTwoBit:
      return block >= 128 && block <= 4096 && block % 128 == 0
                 ? nullptr
                 : "twobit needs a block from 128 to 4096 that 128 divides";
    case kQuantize: return quantize::fault(block, format[2], format[3], format[4]);
    case kTopKBlock: return topk_block::fault(format);
    case kTopKSparse: return topk_sparse::fault(format);
    default: return "unknown family";
  }
}

}  // namespace gradcomm
