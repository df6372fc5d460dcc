// Scalar arithmetic shared by every executor (CPU loops, CUDA, NVRTC, emulator). Free of torch and
// of the standard library, so that a run-time compiler can read it.
//
// Code that decides a byte of a payload lives in this folder and is compiled without contraction
// into fused multiply-adds (-ffp-contract=off, --fmad=false): the executors must agree bit for bit.
#pragma once

#if defined(__CUDACC__)
#define GC_INLINE __host__ __device__ __forceinline__
#else
#define GC_INLINE inline __attribute__((always_inline))
#endif

namespace gradcomm {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

// Every format is laid out in rows of 16 lanes: one AVX-512 register, two AVX2, four NEON or SSE.
constexpr int kLanes = 16;

constexpr u32 kSign = 0x80000000u;
constexpr u32 kMagnitude = 0x7fffffffu;
constexpr u32 kInfinity = 0x7f800000u;  // magnitudes from here up are Inf or NaN
constexpr u32 kNaN = 0x7fc00000u;       // the one NaN that a payload may hold

GC_INLINE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
GC_INLINE float float_of(u32 x) { return __builtin_bit_cast(float, x); }

// Magnitude as an unsigned integer that orders as |x| does, every NaN being the same and largest.
GC_INLINE u32 order_key(u32 bits) {
  const u32 m = bits & kMagnitude;
  return m < kNaN ? m : kNaN;
}

// ---- binary16 and bfloat16 ---------------------------------------------------------------------
// In integer arithmetic, so that they vectorize everywhere and give the same bits everywhere, and
// without a denormal operand, so that they also do where those are flushed to zero. The templates
// take a float and a u32, or compiler vectors of them (csrc/cpu/simd.h); a half is in the low bits.

// Round to nearest, ties to even; every NaN becomes 0x7fc0.
template <class U>
GC_INLINE U bf16_bits(U b) {
  const U rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (b & kMagnitude) > kInfinity ? U{} + 0x7fc0u : rounded;
}

// Round to nearest, ties to even; every NaN becomes 0x7e00; over 65504 becomes Inf.
template <class F, class U>
GC_INLINE U f16_bits(U b) {
  const U m = b & kMagnitude;
  // Normal results: round the mantissa at bit 13, rebias the exponent by -112.
  const U normal = (m - 0x38000000u + 0xfffu + ((m >> 13) & 1u)) >> 13;
  // Denormal results: adding 0.5 lets the adder align and round the mantissa.
  const U denormal = __builtin_bit_cast(U, __builtin_bit_cast(F, m) + 0.5f) - 0x3f000000u;
  const U finite = m < 0x38800000u ? denormal : normal;
  const U signed_half = (m >= 0x477ff000u ? U{} + 0x7c00u : finite) | ((b >> 16) & 0x8000u);
  return m > kInfinity ? U{} + 0x7e00u : signed_half;
}

template <class F, class U>
GC_INLINE U f32_bits_of_f16(U h) {
  const U m = (h & 0x7fffu) << 13;
  // Rebias the exponent by 112, that of Inf and NaN by twice as much.
  const U normal = m + (m < 0x0f800000u ? U{} + 0x38000000u : U{} + 0x70000000u);
  // Denormals: give them the exponent of 2^-14 and its leading one, and take the one away again.
  const F shifted = __builtin_bit_cast(F, m + 0x38800000u) - __builtin_bit_cast(float, 0x38800000u);
  return (m < 0x00800000u ? __builtin_bit_cast(U, shifted) : normal) | ((h & 0x8000u) << 16);
}

GC_INLINE float float_of_bf16(u16 h) { return float_of(u32(h) << 16); }
GC_INLINE u16 bf16_of_float(float x) { return u16(bf16_bits(bits_of(x))); }
GC_INLINE float float_of_f16(u16 h) { return float_of(f32_bits_of_f16<float>(u32(h))); }
GC_INLINE u16 f16_of_float(float x) { return u16(f16_bits<float>(bits_of(x))); }

// ---- counter-based random numbers --------------------------------------------------------------
// A keyed 32-bit finalizer (two multiplications, after Ettinger's lowbias32): the number depends on
// (key, element) alone, so any executor, in any order, with any launch size, draws the same.

struct RandomKey {
  u32 a, b;
};

// Of a block: random_bits(random_key(key, first_element), i) is the number of element first_element + i.
// The key is mixed first, or the keys of two steps would draw the same numbers one element apart.
GC_INLINE RandomKey random_key(u64 key, u64 first_element) {
  key *= 0x9e3779b97f4a7c15ull;
  key = (key ^ (key >> 32)) * 0xd6e8feb86659fd93ull;
  key ^= key >> 32;
  const u32 high = u32(first_element >> 32);
  return RandomKey{u32(key) + u32(first_element) + high * 0x9e3779b9u,
                   u32(key >> 32) ^ (high * 0x85ebca6bu)};
}

template <class U>
GC_INLINE U random_bits(RandomKey key, U counter) {
  U x = counter + key.a;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= (x >> 15) ^ key.b;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

}  // namespace gradcomm
