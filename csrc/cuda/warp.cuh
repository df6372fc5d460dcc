// A warp and its tile: a block of floats in shared memory, read and written four elements a lane.
#pragma once
#include "task.cuh"

namespace gradcomm {

constexpr int kWarp = 32;
constexpr int kWarpsMost = 8;  // of a thread block
constexpr u32 kAllLanes = 0xffffffffu;
constexpr int kStep = 4 * kWarp;  // elements that a warp reads at once

struct alignas(16) Four {
  float v[4];
};
struct alignas(16) FourWords {
  u32 v[4];
};
struct alignas(8) FourHalves {
  u16 v[4];
};

GC_DEVICE int lane_of_thread() { return int(threadIdx.x) % kWarp; }

GC_DEVICE bool is_aligned(const void* p, u64 bytes) { return u64(p) % bytes == 0; }

// Elements of a bucket.
template <i64 Type>
struct Element {
  using Stored = u16;
  using StoredFour = FourHalves;
  static GC_DEVICE float read(u16 x) { return Type == kFloat16 ? float_of_f16(x) : float_of_bf16(x); }
  static GC_DEVICE u16 write(float x) { return Type == kFloat16 ? f16_of_float(x) : bf16_of_float(x); }
};
template <>
struct Element<kFloat32> {
  using Stored = float;
  using StoredFour = Four;
  static GC_DEVICE float read(float x) { return x; }
  static GC_DEVICE float write(float x) { return x; }
};

template <class V>
GC_DEVICE V load_as(const void* p) {
  return *static_cast<const V*>(p);
}
template <class V>
GC_DEVICE void store_as(void* p, V v) {
  *static_cast<V*>(p) = v;
}

// Four elements of a residual, zero behind its count.
GC_DEVICE void put_residual(float* e, bool aligned, int i, i64 count, Four x) {
  if (aligned && i + 4 <= count) {
    store_as(e + i, x);
    return;
  }
  for (int c = 0; c < 4; ++c) e[i + c] = i + c < count ? x.v[c] : 0.0f;
}
GC_DEVICE Four get_residual(const float* e, bool aligned, int i) {
  if (aligned) return load_as<Four>(e + i);
  return Four{{e[i], e[i + 1], e[i + 2], e[i + 3]}};
}

// p = gain g + e of a block, g being zero behind the count. The caller synchronizes the warp.
template <i64 Type>
GC_DEVICE void read_tile(const Task& t, BlockRange r, const float* e, float* p) {
  using E = Element<Type>;
  constexpr int kAhead = 4;  // steps whose loads are in flight together
  const auto* g = static_cast<const typename E::Stored*>(t.source) + r.offset;
  const float gain = t.gain == nullptr ? 1.0f : *t.gain;
  const int lane = lane_of_thread(), block = int(t.block);
  if (r.count == block && is_aligned(g, sizeof(typename E::StoredFour)) && is_aligned(e, 16)) {
    for (int begin = 4 * lane; begin < block; begin += kAhead * kStep) {
      typename E::StoredFour fresh[kAhead];
      Four old[kAhead];
      GC_UNROLL(4)
      for (int k = 0; k < kAhead; ++k) {
        const int i = begin + k * kStep;
        if (i < block) fresh[k] = load_as<typename E::StoredFour>(g + i);
        if (e != nullptr && i < block) old[k] = load_as<Four>(e + i);
      }
      GC_UNROLL(4)
      for (int k = 0; k < kAhead; ++k) {
        const int i = begin + k * kStep;
        if (i >= block) break;
        Four x;
        for (int c = 0; c < 4; ++c) {
          x.v[c] = E::read(fresh[k].v[c]) * gain;
          if (e != nullptr) x.v[c] = x.v[c] + old[k].v[c];
        }
        store_as(p + i, x);
      }
    }
    return;
  }
  GC_UNROLL(4)
  for (int i = lane; i < block; i += kWarp) {  // a segment may begin anywhere
    float x = (i < r.count ? E::read(g[i]) : 0.0f) * gain;
    if (e != nullptr) x = x + e[i];
    p[i] = x;
  }
}

// e <- left(p, old e) where that has a value: left(x, i) of the element i whose p is x.
template <class Left>
GC_DEVICE void write_residual(const Task& t, i64 count, float* e, const float* p, Left left) {
  const bool aligned = is_aligned(e, 16);
  for (int i = 4 * lane_of_thread(); i < t.block; i += kStep) {
    Four x = load_as<Four>(p + i);
    for (int c = 0; c < 4; ++c) x.v[c] = left(x.v[c], i + c);
    put_residual(e, aligned, i, count, x);
  }
}

GC_DEVICE void zero_record(u8* record, i64 bytes) {
  for (i64 i = 4 * lane_of_thread(); i < bytes; i += kStep) store_as(record + i, 0u);
}

// The largest of all lanes' values, in all lanes.
GC_DEVICE u32 largest_of_warp(u32 x) {
  for (int width = kWarp / 2; width > 0; width /= 2) {
    const u32 other = __shfl_xor_sync(kAllLanes, x, width);
    x = other > x ? other : x;
  }
  return x;
}

}  // namespace gradcomm
