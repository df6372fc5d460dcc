// Which instruction set this processor gets.
#include <cstdlib>
#include <cstring>

#include "../device/topk_sparse.cuh"
#include "loops.h"

namespace gradcomm {

#define GC_DECLARE(isa)     \
  namespace isa {           \
  extern const Loops loops; \
  }
GC_DECLARE(baseline)
#ifdef GC_X86
GC_DECLARE(avx2)
GC_DECLARE(avx512)
#endif

i64 sparse_candidates(const i64* format) {
  const i64 k = format[3], elements = format[1] * format[2];
  const i64 most = 2 * k + k / 2 + 4096;  // the sample aims at 1.5 k
  return most < elements ? most : elements;
}

i64 sparse_scratch_floats(const i64* format) {  // struct Selection in topk_select.h
  const i64 block = format[1], words = (block + 63) / 64;
  const i64 floats = 4 * sparse_candidates(format) + format[3] + topk_sparse::kSampleMost + 2 * block;
  return (floats + 2 * words + 1) / 2 * 2;  // of even length: 64-bit words lie at its end
}

i64 scratch_floats(const Args& a) {
  if (a.format[0] == kTopKSparse) {
    const i64 chunk = a.span * a.block;
    if (a.payload == nullptr) return a.out != nullptr && a.dtype != kFloat32 ? chunk : 0;
    return sparse_scratch_floats(a.format) + (a.payloads != nullptr ? chunk : 0);
  }
  constexpr i64 kBlocks = 4;  // one for the harness (blocks.h), the rest for the format
  return kBlocks * a.block;
}

const Loops& select() {
#ifdef GC_X86
  static const Loops& chosen = __builtin_cpu_supports("x86-64-v4")   ? avx512::loops
                               : __builtin_cpu_supports("x86-64-v3") ? avx2::loops
                                                                     : baseline::loops;
  return chosen;
#else
  return baseline::loops;
#endif
}

}  // namespace gradcomm
