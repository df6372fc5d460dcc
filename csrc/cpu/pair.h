// A row of lanes that is wider than a register, as two halves.
//
// g++ 12 keeps compiler vectors wider than a register on the stack and takes their comparisons and
// conversions apart lane by lane. So where a register is narrower than a row, simd.h makes a row of
// these, and pairs of pairs; the operators are those of compiler vectors, but for `?:` (simd.h: select)
// and `[]`.
#pragma once
#include "../device/common.cuh"

namespace gradcomm::GC_ISA {

template <class H>
struct Pair {
  H lo, hi;

  template <class G>
  GC_INLINE explicit operator Pair<G>() const {  // the same bits as another type of lanes
    return {(G)lo, (G)hi};
  }
  GC_INLINE Pair operator-() const { return {-lo, -hi}; }
  GC_INLINE Pair operator~() const { return {~lo, ~hi}; }
};

#define GC_PAIRWISE(op)                                              \
  template <class H>                                                 \
  GC_INLINE auto operator op(Pair<H> a, Pair<H> b) {                 \
    return Pair<decltype(a.lo op b.lo)>{a.lo op b.lo, a.hi op b.hi}; \
  }                                                                  \
  template <class H, class S>                                        \
  GC_INLINE auto operator op(Pair<H> a, S b) {                       \
    return Pair<decltype(a.lo op b)>{a.lo op b, a.hi op b};          \
  }
GC_PAIRWISE(+)
GC_PAIRWISE(-)
GC_PAIRWISE(*)
GC_PAIRWISE(&)
GC_PAIRWISE(|)
GC_PAIRWISE(^)
GC_PAIRWISE(<<)
GC_PAIRWISE(>>)
GC_PAIRWISE(<)
GC_PAIRWISE(>)
GC_PAIRWISE(==)
#undef GC_PAIRWISE

// clang-format off: it would part ##= in two.
#define GC_ASSIGN(op)                                       \
  template <class H, class S>                               \
  GC_INLINE Pair<H>& operator op##=(Pair<H>& a, S b) {      \
    return a = a op b;                                      \
  }
GC_ASSIGN(+)
GC_ASSIGN(*)
GC_ASSIGN(&)
GC_ASSIGN(|)
GC_ASSIGN(^)
#undef GC_ASSIGN
// clang-format on

}  // namespace gradcomm::GC_ISA
