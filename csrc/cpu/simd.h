// Rows of 16 lanes as compiler vectors. g++ and clang lower them to whatever the target has, so one
// source serves AVX-512, AVX2, SSE2 and NEON; the build compiles it once for each (CMakeLists.txt).
#pragma once
#include <cstring>
#include <type_traits>
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

// Not memcpy: where a register is narrower than a row g++ keeps what memcpy has touched on the stack.
template <class V>
struct __attribute__((packed, may_alias)) Unaligned {
  V v;
};
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
  return static_cast<const Unaligned<V>*>(p)->v;
}

template <class V>
GC_INLINE void store(void* p, V v) {
  static_cast<Unaligned<V>*>(p)->v = v;
}

// g++ 12 takes a comparison, a choice or a conversion of vectors wider than a register apart, lane by
// lane. by_registers(f, rows...) hands f one register of each row at a time and joins what it returns.
#if defined(__AVX512F__) || defined(__clang__)
constexpr int kRegisters = 1;
#elif defined(__AVX2__)
constexpr int kRegisters = 2;
#else
constexpr int kRegisters = 4;
#endif

template <class T, int Lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Lanes * sizeof(T))));
};

template <int I, class V>
GC_INLINE auto half(V v) {
  return __builtin_shufflevector(v, v, I, I + 1, I + 2, I + 3, I + 4, I + 5, I + 6, I + 7);
}
template <int I, class V>
GC_INLINE auto quarter(V v) {
  return __builtin_shufflevector(v, v, I, I + 1, I + 2, I + 3);
}
template <class V>
GC_INLINE auto join8(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}
template <class V>
GC_INLINE auto join16(V a, V b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

template <class F, class... V>
GC_INLINE auto by_registers(F f, V... v) {
  if constexpr (kRegisters == 1)
    return f(v...);
  else if constexpr (kRegisters == 2)
    return join16(f(half<0>(v)...), f(half<8>(v)...));
  else
    return join16(join8(f(quarter<0>(v)...), f(quarter<4>(v)...)),
                  join8(f(quarter<8>(v)...), f(quarter<12>(v)...)));
}

// Lane by lane. Between widths as a loop, which g++ 12 vectorizes; its builtin it takes apart.
template <class V, class W>
GC_INLINE V convert(W w) {
  return by_registers(
      [](auto part) {
        constexpr int lanes = kLanes / kRegisters;
        using To = typename VectorOf<std::remove_cvref_t<decltype(V{}[0])>, lanes>::type;
        if constexpr (sizeof(To) == sizeof(part)) {
          return __builtin_convertvector(part, To);
        } else {
          To to;
          for (int i = 0; i < lanes; ++i) to[i] = part[i];
          return to;
        }
      },
      w);
}

GC_INLINE u32x16 bits_of(f32x16 x) { return (u32x16)x; }
GC_INLINE f32x16 float_of(u32x16 x) { return (f32x16)x; }
GC_INLINE f32x16 splat(float x) { return x - f32x16{}; }
GC_INLINE u32x16 splat(u32 x) { return x - u32x16{}; }

GC_INLINE u32x16 max(u32x16 a, u32x16 b) {
  return by_registers([](auto x, auto y) { return x > y ? x : y; }, a, b);
}
GC_INLINE u32x16 min(u32x16 a, u32x16 b) {
  return by_registers([](auto x, auto y) { return x < y ? x : y; }, a, b);
}
GC_INLINE f32x16 max(f32x16 a, f32x16 b) {
  return by_registers([](auto x, auto y) { return x > y ? x : y; }, a, b);
}
GC_INLINE f32x16 min(f32x16 a, f32x16 b) {
  return by_registers([](auto x, auto y) { return x < y ? x : y; }, a, b);
}
GC_INLINE u32x16 order_key(u32x16 b) { return min(b & kMagnitude, splat(kNaN)); }

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

// Halves in the low bits of a row, as common.cuh defines them.
template <class U>
using FloatsLike = typename VectorOf<float, sizeof(U) / sizeof(float)>::type;
GC_INLINE u32x16 bf16_bits(u32x16 b) {
  return by_registers([](auto part) { return gradcomm::bf16_bits(part); }, b);
}
GC_INLINE u32x16 f16_bits(u32x16 b) {
  return by_registers([](auto part) { return gradcomm::f16_bits<FloatsLike<decltype(part)>>(part); }, b);
}
GC_INLINE u32x16 f32_bits_of_f16(u32x16 h) {
  return by_registers(
      [](auto part) { return gradcomm::f32_bits_of_f16<FloatsLike<decltype(part)>>(part); }, h);
}

GC_INLINE f32x16 float_of_bf16(u16x16 h) { return float_of(convert<u32x16>(h) << 16); }
GC_INLINE u16x16 bf16_of_float(f32x16 x) { return convert<u16x16>(bf16_bits(bits_of(x))); }
GC_INLINE f32x16 float_of_f16(u16x16 h) { return float_of(f32_bits_of_f16(convert<u32x16>(h))); }
GC_INLINE u16x16 f16_of_float(f32x16 x) { return convert<u16x16>(f16_bits(bits_of(x))); }
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
