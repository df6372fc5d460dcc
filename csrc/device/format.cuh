// The wire formats: what they are called, and how long their records are.
//
// A payload is a run of records of one size, one a block; the sparse format alone has one record for
// a whole chunk. A format travels as a short list of integers, the first its family; gradcomm/ops/
// format.py is the same table for Python.
#pragma once
#include "common.cuh"

namespace gradcomm {

enum Family : i64 {
  kCast = 0,
  kOneBit = 1,
  kQuantize = 2,
  kTopKBlock = 3,
  kTopKSparse = 4,
  kTwoBit = 5
};
enum WireType : i64 { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

GC_INLINE i64 wire_size(i64 type) { return type == kFloat32 ? 4 : type == kInt8 ? 1 : 2; }

// n-bit fields: a unit of 16 * (8 / n) elements fills 16 bytes. Byte j holds the elements 16 i + j of
// its unit, element i in the bits [n i, n i + n). All lanes shift alike: no executor has to transpose.
GC_INLINE i64 packed_bytes(i64 elements, i64 bits) { return elements * bits / 8; }
GC_INLINE i64 packing_unit(i64 bits) { return kLanes * 8 / bits; }

}  // namespace gradcomm
