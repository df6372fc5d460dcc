// Rows of 16 lanes as compiler vectors. g++ and clang lower them to whatever the target has, so one
// source serves AVX-512, AVX2, SSE2 and NEON; the build compiles it once for each (CMakeLists.txt).
#pragma once
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// The lanes of a comparison that hold, as bits. Compiler vectors have no word for this.
GC_INLINE u32 lanes_where(i32x16 holds) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)holds);
#elif defined(__x86_64__)
  __m128 part[4];
  std::memcpy(part, &holds, sizeof(part));
  u32 lanes = 0;
  for (int i = 0; i < 4; ++i) lanes |= u32(_mm_movemask_ps(part[i])) << (4 * i);
  return lanes;
#else
  u32 lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= u32(holds[i] & 1) << i;
  return lanes;
#endif
}

GC_INLINE u32 largest(u32x16 v) {
  u32 m = 0;
  for (int i = 0; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

}  // namespace gradcomm::GC_ISA
