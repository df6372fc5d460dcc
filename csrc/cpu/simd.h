// Rows of 16 lanes, so that one source serves AVX-512, AVX2, SSE2 and NEON; the build compiles it once
// for each (CMakeLists.txt). A row is a compiler vector where a register holds one, else a Pair of
// halves (pair.h). Both have the usual operators; choices and comparisons go through select, min, max
// and by_registers.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../device/common.cuh"

#ifndef GC_ISA
#error "GC_ISA names the namespace of this instruction set: see CMakeLists.txt"
#endif

#include "pair.h"

namespace gradcomm::GC_ISA {

#if defined(__AVX512F__)
constexpr int kRegisters = 1;  // that a row of floats fills
#elif defined(__AVX2__)
constexpr int kRegisters = 2;
#else
constexpr int kRegisters = 4;
#endif
constexpr int kWidth = kLanes / kRegisters;  // lanes of a row, of any type, in one compiler vector

template <class T, int Count>
struct VectorOf {
  typedef T type __attribute__((vector_size(Count * sizeof(T))));
};
template <class T, int Count>
struct RowOf {
  using type = Pair<typename RowOf<T, Count / 2>::type>;
};
template <class T>
struct RowOf<T, kWidth> : VectorOf<T, kWidth> {};
template <class T>
using Row = typename RowOf<T, kLanes>::type;

using f32x16 = Row<float>;
using u32x16 = Row<u32>;
using i32x16 = Row<i32>;
using u16x16 = Row<u16>;
using u8x16 = Row<u8>;
using i8x16 = Row<i8>;

// One register of a row: for loops in which nothing crosses registers.
using f32n = typename VectorOf<float, kWidth>::type;
using i32n = typename VectorOf<i32, kWidth>::type;

template <class V>
constexpr bool is_pair = false;
template <class H>
constexpr bool is_pair<Pair<H>> = true;

// Not memcpy, which makes g++ keep what it has touched on the stack.
template <class V>
struct __attribute__((packed, may_alias)) Unaligned {
  V v;
};
template <class V>
GC_INLINE V load(const void* p) {
  if constexpr (is_pair<V>) {
    using H = decltype(V{}.lo);
    return V{load<H>(p), load<H>(static_cast<const char*>(p) + sizeof(H))};
  } else {
    return static_cast<const Unaligned<V>*>(p)->v;
  }
}
template <class V>
GC_INLINE void store(void* p, V v) {
  if constexpr (is_pair<V>) {
    store(p, v.lo);
    store(static_cast<char*>(p) + sizeof(v.lo), v.hi);
  } else {
    static_cast<Unaligned<V>*>(p)->v = v;
  }
}

// f(rows...), one register of each row at a time.
template <class F, class V, class... W>
GC_INLINE auto by_registers(F f, V v, W... w) {
  if constexpr (is_pair<V>) {
    const auto lo = by_registers(f, v.lo, w.lo...);
    return Pair<std::remove_cv_t<decltype(lo)>>{lo, by_registers(f, v.hi, w.hi...)};
  } else {
    return f(v, w...);
  }
}

// Lanes (First ^ i) * Stride for each i.
template <int First, int Stride, class V, int... I>
GC_INLINE auto lanes_of(V v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, ((First ^ I) * Stride)...);
}
using AllLanes = std::make_integer_sequence<int, kWidth>;

// Lane by lane. Between widths g++ 12 vectorizes a loop for wider lanes, for narrower ones only with
// AVX-512; else the low parts of the lanes are picked. Its builtin it takes apart.
template <class V, class W>
GC_INLINE V convert(W w) {
  if constexpr (is_pair<V>) {
    using H = decltype(V{}.lo);
    return V{convert<H>(w.lo), convert<H>(w.hi)};
  } else if constexpr (sizeof(V) == sizeof(W)) {
    return __builtin_convertvector(w, V);
  } else if constexpr (sizeof(V) > sizeof(W) || kRegisters == 1) {
    V v;
    for (int i = 0; i < kWidth; ++i) v[i] = w[i];
    return v;
  } else {
    constexpr int stride = sizeof(W) / sizeof(V);
    using Parts = typename VectorOf<std::remove_cvref_t<decltype(V{}[0])>, kWidth * stride>::type;
    return lanes_of<0, stride>((Parts)w, AllLanes{});
  }
}

// ---- arithmetic ----------------------------------------------------------------------------------

GC_INLINE u32x16 bits_of(f32x16 x) { return (u32x16)x; }
GC_INLINE f32x16 float_of(u32x16 x) { return (f32x16)x; }
template <class V, class T>
GC_INLINE V splat_to(T x) {
  if constexpr (is_pair<V>) {
    const auto half = splat_to<decltype(V{}.lo)>(x);
    return V{half, half};
  } else {
    return x - V{};  // and not plus, which would lose -0
  }
}
GC_INLINE f32x16 splat(float x) { return splat_to<f32x16>(x); }
GC_INLINE u32x16 splat(u32 x) { return splat_to<u32x16>(x); }

template <class V>
GC_INLINE V max(V a, V b) {
  return by_registers([](auto x, auto y) { return x > y ? x : y; }, a, b);
}
template <class V>
GC_INLINE V min(V a, V b) {
  return by_registers([](auto x, auto y) { return x < y ? x : y; }, a, b);
}
// Lanes of a where the mask is not 0, else of b.
template <class M, class V>
GC_INLINE V select(M mask, V a, V b) {
  return by_registers([](auto m, auto x, auto y) { return m ? x : y; }, mask, a, b);
}
GC_INLINE u32x16 order_key(u32x16 b) { return min(b & kMagnitude, splat(kNaN)); }

// Folds the lanes as a tree: half of them a step.
template <int Width, class V, class Take>
GC_INLINE auto fold_vector(V v, Take take) {
  if constexpr (Width == 0) return v[0];
  else return fold_vector<Width / 2>(take(v, lanes_of<Width, 1>(v, AllLanes{})), take);
}
template <class V, class Take>
GC_INLINE auto fold(V v, Take take) {
  if constexpr (is_pair<V>) return fold(take(v.lo, v.hi), take);
  else return fold_vector<kWidth / 2>(v, take);
}
GC_INLINE u32 largest(u32x16 v) {
  return fold(v, [](auto a, auto b) { return max(a, b); });
}
GC_INLINE float largest(f32x16 v) {
  return fold(v, [](auto a, auto b) { return max(a, b); });
}
GC_INLINE float smallest(f32x16 v) {
  return fold(v, [](auto a, auto b) { return min(a, b); });
}

// ---- one register --------------------------------------------------------------------------------

// Magnitudes as signed integers, which every processor can compare.
GC_INLINE i32n magnitude(f32n x) { return (i32n)x & i32(kMagnitude); }
GC_INLINE i32n order_key(f32n x) { return min(magnitude(x), i32n{} + i32(kNaN)); }
GC_INLINE i32 largest(i32n v) {
  return fold(v, [](auto a, auto b) { return max(a, b); });
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
  for (int i = 0; i < kWidth; ++i) lanes |= (u32(v[i]) >> 31) << i;
  return lanes;
#endif
}

// ---- halves in the low bits of a row, as common.cuh defines them -----------------------------------

// What a row of floats becomes as binary16, and what those decode to.
struct F16Row {
  u16x16 bits;
  f32x16 value;
};

template <class U>
using FloatsLike = typename VectorOf<float, sizeof(U) / sizeof(float)>::type;
GC_INLINE u32x16 bf16_bits(u32x16 b) {
  return by_registers([](auto part) { return gradcomm::bf16_bits(part); }, b);
}
GC_INLINE f32x16 float_of_bf16(u16x16 h) { return float_of(convert<u32x16>(h) << 16); }
GC_INLINE u16x16 bf16_of_float(f32x16 x) { return convert<u16x16>(bf16_bits(bits_of(x))); }

#if defined(__F16C__)
// The processor's own conversions: they round alike, and neither flushes denormals nor heeds the mode
// in which others are flushed. Only a NaN keeps its sign and payload there, so it is replaced before.
using u16n = typename VectorOf<u16, kWidth>::type;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
constexpr u16 kAll = 0xffff;  // lanes; with a mask, since g++ 12 warns of the plain intrinsics' innards

GC_INLINE u16n f16_of_register(f32n x) {
  const i32n m = magnitude(x);
  const i32n b = m > i32(kInfinity) ? i32n{} + i32(kNaN) : (i32n)x;
#if defined(__AVX512F__)
  return (u16n)_mm512_maskz_cvtps_ph(kAll, (__m512)b, kNearest);
#else
  return (u16n)_mm256_cvtps_ph((__m256)b, kNearest);
#endif
}
GC_INLINE f32n float_of_register(u16n h) {
#if defined(__AVX512F__)
  return (f32n)_mm512_maskz_cvtph_ps(kAll, (__m256i)h);
#else
  return (f32n)_mm256_cvtph_ps((__m128i)h);
#endif
}
GC_INLINE f32x16 float_of_f16(u16x16 h) {
  return by_registers([](auto part) { return float_of_register(part); }, h);
}
GC_INLINE u16x16 f16_of_float(f32x16 x) {
  return by_registers([](auto part) { return f16_of_register(part); }, x);
}
GC_INLINE F16Row round_to_f16(f32x16 x) {
  const u16x16 half = f16_of_float(x);
  return {half, float_of_f16(half)};
}
#else
GC_INLINE u32x16 f16_bits(u32x16 b) {
  return by_registers([](auto part) { return gradcomm::f16_bits<FloatsLike<decltype(part)>>(part); }, b);
}
GC_INLINE u32x16 f32_bits_of_f16(u32x16 h) {
  return by_registers(
      [](auto part) { return gradcomm::f32_bits_of_f16<FloatsLike<decltype(part)>>(part); }, h);
}
GC_INLINE f32x16 float_of_f16(u16x16 h) { return float_of(f32_bits_of_f16(convert<u32x16>(h))); }
GC_INLINE u16x16 f16_of_float(f32x16 x) { return convert<u16x16>(f16_bits(bits_of(x))); }
// In wide lanes on the way: g++ 12 takes a narrowing that is widened again apart, lane by lane.
GC_INLINE F16Row round_to_f16(f32x16 x) {
  const u32x16 half = f16_bits(bits_of(x));
  return {convert<u16x16>(half), float_of(f32_bits_of_f16(half))};
}
#endif

}  // namespace gradcomm::GC_ISA
