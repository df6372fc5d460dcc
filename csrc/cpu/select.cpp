// Which instruction set this processor gets.
#include <cstdlib>
#include <cstring>

#include "loops.h"

namespace gradcomm {

#define GC_DECLARE(isa) \
  namespace isa {       \
  extern const Loops loops; \
  }
GC_DECLARE(baseline)
#ifdef GC_X86
GC_DECLARE(avx2)
GC_DECLARE(avx512)
#endif

i64 scratch_floats(const Args& a) {
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
