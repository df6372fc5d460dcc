// The mean over ranks of sparse records, and what they sent. A thread block takes a tile of the chunk,
// finds each rank's entries of it, which lie in order, and adds them rank by rank in shared memory: the
// chunk is written once and never read.
//
// An index out of bounds, or out of its order, is not reported, which would need the host to wait: it
// makes a tile NaN, which every rank sees, and touches nothing else.
#pragma once
#include "sparse_reader.cuh"

namespace gradcomm {

constexpr int kTileElements = 8192;
constexpr int kRanksAtOnce = kWarpsMost;  // a warp finds the entries of a rank
constexpr int kRuns = 6;                  // numbers that it tells
constexpr int kDecodeWords = kTileElements + kRanksAtOnce * kRuns + 1;

// A rank's entries of one record.
struct Entries {
  topk_sparse::Wire w;
  const u8* record;

  GC_DEVICE u32 index(i64 i) const { return load_as<u32>(record + w.indices + 4 * i); }
  GC_DEVICE float value(i64 i, float inverse) const {
    const u8* const at = record + w.values + i * wire_size(w.type);
    if (w.type == kFloat32) return load_as<float>(at) * inverse;
    if (w.type == kFloat16) return float_of_f16(load_as<u16>(at)) * inverse;
    const float scale = load_as<float>(record + i / topk_sparse::kScaled * 4);
    return float(i8(*at)) * scale * inverse;
  }
};

// One warp: the first of the entries [low, high) of which `behind` holds, when it holds for all that
// follow; 32 are looked at together.
template <class Behind>
GC_DEVICE i64 find_first(i64 low, i64 high, Behind behind) {
  while (low < high) {
    const i64 step = (high - low + kWarp - 1) / kWarp;
    const i64 end = low + (lane_of_thread() + 1) * step, last = (end < high ? end : high) - 1;
    const u32 lanes = __ballot_sync(kAllLanes, end - step >= high || behind(last));
    if (lanes == 0) return high;
    low += (__ffs(int(lanes)) - 1) * step;
    if (step == 1 || low >= high) return low < high ? low : high;
    high = low + step < high ? low + step : high;
  }
  return low;
}

// Where a rank's entries of a tile are: two runs, since the record may begin anywhere in the chunk, and
// its share of those behind the last one in use, which are only looked at.
struct Runs {
  i64 low, high, low_wrapped, high_wrapped, unused, unused_end;
};

GC_DEVICE Runs find_runs(const Entries& entries, bool exact, i64 tile, i64 tiles) {
  const i64 k = entries.w.k, begin = tile * kTileElements, end = begin + kTileElements;
  const bool first = tile == 0, last = tile + 1 == tiles;
  const i64 used = find_first(0, k, [&](i64 i) { return entries.index(i) == topk_sparse::kUnused; });
  i64 wrap = used;
  if (!exact && used > 0) {
    const u32 start = entries.index(0);
    wrap = find_first(0, used, [&](i64 i) { return entries.index(i) < start; });
  }
  const auto find = [&](i64 low, i64 high, i64 element) {
    return find_first(low, high, [&](i64 i) { return i64(entries.index(i)) >= element; });
  };
  Runs x;
  x.low = first ? 0 : find(0, wrap, begin);
  x.high = last ? wrap : find(0, wrap, end);
  x.low_wrapped = first ? wrap : find(wrap, used, begin);
  x.high_wrapped = last ? used : find(wrap, used, end);
  x.unused = used + (k - used) * tile / tiles;
  x.unused_end = used + (k - used) * (tile + 1) / tiles;
  return x;
}

// All threads: the tile's mean, in shared memory; false where a payload is not what it should be.
GC_DEVICE bool mean_of_tile(const Task& t, i64 r, i64 tile, i64 tiles, float* mean, u32* told,
                            u32* broken) {
  const topk_sparse::Wire w = topk_sparse::wire(t.format);
  const bool exact = t.format[5] == topk_sparse::kExact;
  const float inverse = 1.0f / float(t.ranks);
  const i64 begin = tile * kTileElements, left = chunk_elements(t) - begin;
  const i64 places = left < kTileElements ? left : kTileElements;
  const int thread = int(threadIdx.x), threads = int(blockDim.x), warps = threads / kWarp;
  for (int i = thread; i < kTileElements; i += threads) mean[i] = 0.0f;
  if (thread == 0) *broken = 0;
  for (i64 rank = 0; rank < t.ranks; rank += warps) {
    const i64 mine = rank + thread / kWarp;
    if (mine < t.ranks) {
      const Entries entries{w, t.payloads + mine * t.rank_stride + r * t.record};
      const Runs x = find_runs(entries, exact, tile, tiles);
      u32* const say = told + thread / kWarp * kRuns;
      if (lane_of_thread() == 0) {
        say[0] = u32(x.low);
        say[1] = u32(x.high);
        say[2] = u32(x.low_wrapped);
        say[3] = u32(x.high_wrapped);
        say[4] = u32(x.unused);
        say[5] = u32(x.unused_end);
      }
    }
    __syncthreads();
    for (int n = 0; n < warps && rank + n < t.ranks; ++n) {
      const Entries entries{w, t.payloads + (rank + n) * t.rank_stride + r * t.record};
      const u32* const at = told + n * kRuns;
      const auto add = [&](i64 i) {
        const i64 place = i64(entries.index(i)) - begin;
        if (place >= 0 && place < places) mean[place] = mean[place] + entries.value(i, inverse);
        else *broken = 1;
      };
      for (i64 i = at[0] + thread; i < at[1]; i += threads) add(i);
      for (i64 i = at[2] + thread; i < at[3]; i += threads) add(i);
      for (i64 i = at[4] + thread; i < at[5]; i += threads)
        if (entries.index(i) != topk_sparse::kUnused) *broken = 1;
      __syncthreads();  // ranks are added one after another
    }
  }
  return *broken == 0;
}

template <i64 Type>
GC_DEVICE void sparse_decode_mean(const Task& t) {
  using E = Element<Type>;
  GC_SHARED(float, mean);
  u32* const told = reinterpret_cast<u32*>(mean + kTileElements);
  const i64 most = (chunk_elements(t) + kTileElements - 1) / kTileElements;
  auto* const out = static_cast<typename E::Stored*>(t.out);
  for (i64 n = blockIdx.x; n < t.end * most; n += gridDim.x) {
    const i64 r = n / most, tile = n % most, used = used_end(t, r);
    const i64 tiles = (used + kTileElements - 1) / kTileElements;
    if (tile >= tiles) continue;
    const bool good = mean_of_tile(t, r, tile, tiles, mean, told, told + kRanksAtOnce * kRuns);
    const i64 first = first_element(t, r) + tile * kTileElements;
    const i64 end = first_element(t, r) + used, behind = first + kTileElements;
    for_stretches(t, first, end < behind ? end : behind, [&](const Stretch& s) {
      for (i64 i = s.begin + threadIdx.x; i < s.end; i += blockDim.x)
        out[i + s.shift] = E::write(good ? mean[i - first] : float_of(kNaN));
    });
    __syncthreads();  // before the tile is written again
  }
}

// Zeroes in the residual what the payload sent.
GC_DEVICE void sparse_mask(const Task& t) {
  const topk_sparse::Wire w = topk_sparse::wire(t.format);
  const i64 elements = chunk_elements(t), threads = i64(gridDim.x) * blockDim.x;
  for (i64 n = i64(blockIdx.x) * blockDim.x + threadIdx.x; n < t.end * w.k; n += threads) {
    const i64 r = n / w.k;
    const i64 index = Entries{w, t.payloads + r * t.record}.index(n % w.k);
    if (index < elements && place_of(t, first_element(t, r) + index) >= 0)
      t.residual[r * elements + index] = 0.0f;
  }
}

// The segments of a launch, for later ones to find in memory.
GC_DEVICE void sparse_segments(const Task& t) {
  const i64 begin = t.begin + i64(blockIdx.x) * blockDim.x + threadIdx.x;
  for (i64 i = begin; i < t.end; i += i64(gridDim.x) * blockDim.x) t.table[i] = t.segments[i - t.begin];
}

}  // namespace gradcomm
