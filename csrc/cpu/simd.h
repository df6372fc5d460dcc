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

// Lane by lane. Between widths as a loop, which g++ 12 vectorizes; its builtin it takes apart.
template <class V, class W>
GC_INLINE V convert(W w) {
  if constexpr (sizeof(V) == sizeof(W)) {
    return __builtin_convertvector(w, V);
  } else {
    V v;
    for (int i = 0; i < kLanes; ++i) v[i] = w[i];
    return v;
  }
}

GC_INLINE u32x16 bits_of(f32x16 x) { return (u32x16)x; }
GC_INLINE f32x16 float_of(u32x16 x) { return (f32x16)x; }
GC_INLINE f32x16 splat(float x) { return x - f32x16{}; }
GC_INLINE u32x16 splat(u32 x) { return x - u32x16{}; }

GC_INLINE u32x16 max(u32x16 a, u32x16 b) { return a > b ? a : b; }
GC_INLINE u32x16 min(u32x16 a, u32x16 b) { return a < b ? a : b; }
GC_INLINE u32x16 order_key(u32x16 b) { return min(b & kMagnitude, splat(kNaN)); }

GC_INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }
GC_INLINE f32x16 min(f32x16 a, f32x16 b) { return a < b ? a : b; }

// Folds the lanes as a tree: half of them a step.
template <class V, class Take>
GC_INLINE auto fold(V v, Take take) {
  v = take(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = take(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  v = take(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  v = take(v, __builtin_shufflevector(v, v, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0));
  return v[0];
}
GC_INLINE u32 largest(u32x16 v) { return fold(v, [](u32x16 a, u32x16 b) { return max(a, b); }); }
GC_INLINE float largest(f32x16 v) { return fold(v, [](f32x16 a, f32x16 b) { return max(a, b); }); }
GC_INLINE float smallest(f32x16 v) { return fold(v, [](f32x16 a, f32x16 b) { return min(a, b); }); }

// Halves, as common.cuh defines them.
GC_INLINE f32x16 float_of_bf16(u16x16 h) { return float_of(convert<u32x16>(h) << 16); }
GC_INLINE u16x16 bf16_of_float(f32x16 x) { return convert<u16x16>(gradcomm::bf16_bits(bits_of(x))); }
GC_INLINE f32x16 float_of_f16(u16x16 h) {
  return float_of(gradcomm::f32_bits_of_f16<f32x16>(convert<u32x16>(h)));
}
GC_INLINE u16x16 f16_of_float(f32x16 x) {
  return convert<u16x16>(gradcomm::f16_bits<f32x16>(bits_of(x)));
}

}  // namespace gradcomm::GC_ISA
