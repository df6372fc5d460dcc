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

// Vectors of the processor's own width. Where 16 lanes need several registers, g++ takes comparisons
// apart lane by lane and keeps what a loop carries in memory: loops that compare use these.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
using f32n = float __attribute__((vector_size(4 * kNative)));
using i32n = i32 __attribute__((vector_size(4 * kNative)));

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

// Magnitudes as signed integers, which every processor can compare.
GC_INLINE i32n magnitude(f32n x) { return (i32n)x & i32(kMagnitude); }
GC_INLINE i32n max(i32n a, i32n b) { return a > b ? a : b; }
GC_INLINE i32n order_key(f32n x) {
  const i32n m = magnitude(x), nan = i32n{} + i32(kNaN);
  return m < nan ? m : nan;
}
GC_INLINE i32 largest(i32n v) {
  i32 m = v[0];
  for (int i = 1; i < kNative; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// x where it is finite, else y.
GC_INLINE f32n finite_or(f32n x, f32n y) { return magnitude(x) < i32(kInfinity) ? x : y; }

// The sign of each lane, as bits. Compiler vectors have no word for this.
GC_INLINE u32 signs_of(i32n v) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)v);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)v);
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)v);
#else
  u32 lanes = 0;
  for (int i = 0; i < kNative; ++i) lanes |= (u32(v[i]) >> 31) << i;
  return lanes;
#endif
}

}  // namespace gradcomm::GC_ISA
