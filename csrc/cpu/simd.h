// Rows of 16 lanes as compiler vectors. g++ and clang lower them to whatever the target has, so one
// source serves AVX-512, AVX2, SSE2 and NEON; the build compiles it once for each (CMakeLists.txt).
#pragma once
#include <cstring>

#include "../device/common.cuh"

#ifndef GC_ISA
#error "GC_ISA names the namespace of this instruction set: see CMakeLists.txt"
#endif

namespace gradcomm::GC_ISA {

using f32x16 = float __attribute__((vector_size(64)));
using u32x16 = u32 __attribute__((vector_size(64)));
using i32x16 = i32 __attribute__((vector_size(64)));
using u16x16 = u16 __attribute__((vector_size(32)));
using u8x16 = u8 __attribute__((vector_size(16)));
using i8x16 = i8 __attribute__((vector_size(16)));

template <class V>
GC_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
GC_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

template <class V, class W>
GC_INLINE V convert(W w) {
  return __builtin_convertvector(w, V);
}

GC_INLINE u32x16 bits_of(f32x16 x) { return (u32x16)x; }
GC_INLINE f32x16 float_of(u32x16 x) { return (f32x16)x; }
GC_INLINE f32x16 splat(float x) { return x - f32x16{}; }
GC_INLINE u32x16 splat(u32 x) { return x - u32x16{}; }

GC_INLINE u32x16 max(u32x16 a, u32x16 b) { return a > b ? a : b; }
GC_INLINE u32x16 min(u32x16 a, u32x16 b) { return a < b ? a : b; }
GC_INLINE u32x16 order_key(u32x16 b) { return min(b & kMagnitude, splat(kNaN)); }

GC_INLINE u32 largest(u32x16 v) {
  u32 m = 0;
  for (int i = 0; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

}  // namespace gradcomm::GC_ISA
