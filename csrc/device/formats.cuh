// One look-up for all formats: how long a record is, and what is wrong with a format.
#pragma once
#include "onebit.cuh"

namespace gradcomm {

GC_INLINE i64 record_bytes(const i64* format) {
  switch (format[0]) {
    case kOneBit: return onebit::record_bytes(format[1]);
    default: return 0;
  }
}

// Blocks that a record stands for.
GC_INLINE i64 record_span(const i64*) { return 1; }

// Null when the integers describe a format, else what is wrong with them.
GC_INLINE const char* format_fault(const i64* format) {
  const i64 block = format[1];
  switch (format[0]) {
    case kOneBit:
      return block >= 128 && block <= 4096 && block % 128 == 0
                 ? nullptr : "onebit needs a block from 128 to 4096 that 128 divides";
    default: return "unknown family";
  }
}

}  // namespace gradcomm
