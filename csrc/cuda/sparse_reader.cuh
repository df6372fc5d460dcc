// The elements of a chunk, for the sparse top-k: where they are, and p = gain g + e of them.
#pragma once
#include "sparse_scratch.cuh"
#include "warp.cuh"

namespace gradcomm {

GC_DEVICE const Segment* segments_of(const Task& t) { return t.table != nullptr ? t.table : t.segments; }

GC_DEVICE i64 chunk_elements(const Task& t) { return t.block * t.format[2]; }

// The first element of record r in block space.
GC_DEVICE i64 first_element(const Task& t, i64 r) {
  return t.block_begin * t.block + r * chunk_elements(t);
}

// A stretch of one segment in block space: the elements [begin, end), and behind them those up to
// `padded` that are not in use, of the segment's last block. Element i lies at i + shift of the bucket.
struct Stretch {
  i64 begin, end, padded, shift;
};

// What [low, high) of block space has of segment s.
GC_DEVICE Stretch stretch_of(const Task& t, const Segment& s, i64 low, i64 high) {
  const i64 first = s.first_block * t.block, end = first + s.numel;
  const i64 padded = first + (s.numel + t.block - 1) / t.block * t.block;
  Stretch x;
  x.begin = low > first ? low : first;
  x.end = high < end ? high : end;
  x.padded = high < padded ? high : padded;
  x.shift = t.flat != 0 ? -t.block_begin * t.block : s.offset - first;
  return x;
}

// Calls use(Stretch) for those of [low, high), in order. All lanes alike.
template <class Use>
GC_DEVICE void for_stretches(const Task& t, i64 low, i64 high, Use use) {
  const Segment* const segments = segments_of(t);
  i64 s = find_segment(segments, t.num_segments, low / t.block);
  for (s = s < 0 ? 0 : s; s < t.num_segments && segments[s].first_block * t.block < high; ++s) {
    const Stretch x = stretch_of(t, segments[s], low, high);
    if (x.begin < x.padded) use(x);
  }
}

// One past the last element in use of record r, from the record's first on.
GC_DEVICE i64 used_end(const Task& t, i64 r) {
  const i64 first = first_element(t, r), elements = chunk_elements(t);
  const Segment* const segments = segments_of(t);
  const i64 s = find_segment(segments, t.num_segments, (first + elements - 1) / t.block);
  if (s < 0) return 0;
  const i64 end = segments[s].first_block * t.block + segments[s].numel - first;
  return end < 0 ? 0 : end < elements ? end : elements;
}

// Where element i of block space lies in the bucket; -1 where it is not in use.
GC_DEVICE i64 place_of(const Task& t, i64 i) {
  const Segment* const segments = segments_of(t);
  const i64 s = find_segment(segments, t.num_segments, i / t.block);
  if (s < 0) return -1;
  const Stretch x = stretch_of(t, segments[s], i, i + 1);
  return i < x.end ? i + x.shift : -1;
}

// Four elements, of which the first `count` are in use: p, and the residual of before.
struct Read {
  Four p, old;
  int count;
};

template <i64 Type>
struct Reader {
  using E = Element<Type>;
  const typename E::Stored* source;
  float* residual;  // of element 0 of block space; null without error feedback
  float gain;
  bool aligned;

  explicit GC_DEVICE Reader(const Task& t)
      : source(static_cast<const typename E::Stored*>(t.source)),
        residual(t.residual == nullptr ? nullptr : t.residual - t.block_begin * t.block),
        gain(t.gain == nullptr ? 1.0f : *t.gain),
        aligned(is_aligned(t.residual, 16)) {}

  GC_DEVICE float p_at(i64 i, i64 place) const {
    float x = E::read(source[place]) * gain;
    if (residual != nullptr) x = x + residual[i];
    return x;
  }

  // The elements of a stretch from i on, a multiple of 4.
  GC_DEVICE Read four_at(const Stretch& s, i64 i) const {
    using G = typename E::StoredFour;
    Read x{};
    const i64 left = s.end - i;
    x.count = left < 0 ? 0 : left < 4 ? int(left) : 4;
    const auto* const g = source + (i + s.shift);
    if (x.count == 4 && aligned && is_aligned(g, sizeof(G))) {
      const G fresh = load_as<G>(g);
      if (residual != nullptr) x.old = load_as<Four>(residual + i);
      for (int c = 0; c < 4; ++c) x.p.v[c] = E::read(fresh.v[c]) * gain;
    } else {
      for (int c = 0; c < 4; ++c) {
        if (c >= x.count) break;
        x.p.v[c] = E::read(g[c]) * gain;
        if (residual != nullptr) x.old.v[c] = residual[i + c];
      }
    }
    if (residual != nullptr)
      for (int c = 0; c < 4; ++c) x.p.v[c] = x.p.v[c] + x.old.v[c];
    return x;
  }
};

// A record's slab s, as up to two runs of block space: it may wrap round at the record's end.
struct Slab {
  i64 low, high, low_wrapped, high_wrapped;
};

GC_DEVICE i64 start_of(const Task& t, i64 first) {
  if (t.format[5] == topk_sparse::kExact) return 0;
  return topk_sparse::start_block(t.key, u64(first), t.format[2]) * t.block;
}

GC_DEVICE Slab slab_of(const Task& t, i64 r, i64 s) {
  const i64 first = first_element(t, r), elements = chunk_elements(t), start = start_of(t, first);
  const i64 begin = s * t.slab, behind = begin + t.slab;
  const i64 end = behind < elements ? behind : elements, wrap = elements - start;
  Slab x;
  const i64 middle = end < wrap ? end : begin > wrap ? begin : wrap;
  x.low = first + start + begin;
  x.high = first + start + middle;
  x.low_wrapped = first + (begin > wrap ? begin : wrap) - wrap;
  x.high_wrapped = first + end - wrap;
  return x;
}

// Calls use(Stretch, i) for every step of a warp, i being this lane's first element, in the order of
// the slab. All lanes come, even where a lane has no element.
template <class Use>
GC_DEVICE void for_steps(const Task& t, const Slab& slab, Use use) {
  GC_UNROLL(1)
  for (int run = 0; run < 2; ++run) {
    const i64 low = run == 0 ? slab.low : slab.low_wrapped;
    const i64 high = run == 0 ? slab.high : slab.high_wrapped;
    if (low >= high) continue;
    for_stretches(t, low, high, [&](const Stretch& s) {
      for (i64 i = s.begin; i < s.padded; i += kStep) use(s, i + 4 * lane_of_thread());
    });
  }
}

GC_DEVICE u32 sum_of_warp(u32 x) {
  for (int width = kWarp / 2; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}

GC_DEVICE u32 lanes_before() { return (1u << lane_of_thread()) - 1u; }

}  // namespace gradcomm
