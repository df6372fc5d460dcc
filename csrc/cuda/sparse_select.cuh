// Which elements a chunk sends (csrc/device/topk_sparse.cuh has the rules), in launches of which each
// reads what the ones before it left:
//
//   sample    one thread block a record: a threshold from a sample. All: the rest of the scratch as 0,
//             and the payload as records without an entry
//   collect   reads p. Counts what passes the threshold; exact: lists those keys, and counts the first
//             digit of every key
//   refine    exact, twice: counts the next digit of the keys that share the digits before it
//   count     exact: of every slab, the keys over the k-th largest and those equal to it
//   place     sparse_place.cuh; reads p, writes the entries and the residual
//
// refine and count read the listed keys. Where the sample misjudged, or a slab had no room for its keys,
// they read p in their place: slower, and the same.
#pragma once
#include "sparse_reader.cuh"

namespace gradcomm {

// Words of shared memory.
constexpr int kSampleWords = int(topk_sparse::kSampleMost) + 256 + 4;
constexpr int kDigitWords = 2048 + 4;  // a histogram, and what one warp tells the others
constexpr int kPlaceWords = 8;

GC_DEVICE u32* state_of(const Task& t, i64 r) {
  return t.scratch + table_words(t.num_segments) + r * sparse_state(t.format).words;
}

GC_DEVICE bool is_exact(const Task& t) { return t.format[5] == topk_sparse::kExact; }

GC_DEVICE i64 wanted_of(const Task& t, i64 used) { return t.format[3] < used ? t.format[3] : used; }

// The key of the rank-th largest of n keys in shared memory, by four digits of 8 bits. All threads.
GC_DEVICE u32 kth_of_shared(const u32* keys, u32 n, u32 rank, u32* bins, u32* told) {
  u32 prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < n; i += blockDim.x)
      if ((u64(keys[i]) >> (shift + 8)) == prefix) atomicAdd(&bins[keys[i] >> shift & 255u], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 bin = 255;
      for (; bin > 0 && bins[bin] < rank; --bin) rank -= bins[bin];
      told[0] = bin;
      told[1] = rank;
    }
    __syncthreads();
    prefix = prefix << 8 | told[0];
    rank = told[1];
    __syncthreads();
  }
  return prefix;
}

template <i64 Type>
GC_DEVICE void sample_record(const Task& t, i64 r) {
  GC_SHARED(u32, words);
  u32 *const keys = words, *const bins = keys + topk_sparse::kSampleMost, *const told = bins + 256;
  const SparseState at = sparse_state(t.format);
  const Reader<Type> reader(t);
  const i64 first = first_element(t, r), elements = chunk_elements(t);
  __syncthreads();  // the words may be of the record before
  if (threadIdx.x < 4) told[threadIdx.x] = 0;
  __syncthreads();
  const Segment* const segments = segments_of(t);
  for (i64 s = threadIdx.x; s < t.num_segments; s += blockDim.x) {
    const Stretch x = stretch_of(t, segments[s], first, first + elements);
    if (x.begin < x.end) atomicAdd(&told[2], u32(x.end - x.begin));
  }
  const i64 stride = topk_sparse::sample_stride(elements);
  for (i64 i = threadIdx.x * stride; i < elements; i += blockDim.x * stride) {
    const i64 place = place_of(t, first + i);
    if (place >= 0) keys[atomicAdd(&told[3], 1u)] = order_key(bits_of(reader.p_at(first + i, place)));
  }
  __syncthreads();
  const u32 used = told[2], sampled = told[3];
  const i64 wanted = wanted_of(t, used);
  i64 rank = 0;  // 0: none
  if (sampled > 0 && !is_exact(t)) rank = topk_sparse::sample_rank(sampled, wanted, used);
  if (sampled > 0 && is_exact(t)) {
    // About 1.5 times the wanted pass; any threshold gives the same bytes.
    rank = topk_sparse::sample_rank(sampled, wanted + wanted / 2, used) + 8;
    rank = rank <= sampled ? rank : 0;
  }
  u32 threshold = 0;
  if (rank > 0) threshold = kth_of_shared(keys, sampled, u32(rank), bins, told);
  if (threadIdx.x != 0) return;
  u32* const state = state_of(t, r);
  state[at.threshold] = threshold < 1 && !is_exact(t) ? 1 : threshold;
  state[at.used] = used;
}

template <i64 Type>
GC_DEVICE void sparse_sample(const Task& t) {
  const SparseState at = sparse_state(t.format);
  const topk_sparse::Wire w = topk_sparse::wire(t.format);
  const i64 thread = i64(blockIdx.x) * blockDim.x + threadIdx.x, threads = i64(gridDim.x) * blockDim.x;
  for (i64 r = 0; r < t.end; ++r) {
    u32* const state = state_of(t, r);
    for (i64 i = thread; i < at.zeroed; i += threads) state[i] = 0;
    u8* const record = t.payload + r * t.record;
    const bool any = used_end(t, r) > 0;
    for (i64 i = 4 * thread; i < t.record; i += 4 * threads)
      store_as(record + i, any && i >= w.indices && i < w.values ? topk_sparse::kUnused : 0u);
  }
  for (i64 r = blockIdx.x; r < t.end; r += gridDim.x) sample_record<Type>(t, r);
}

// Calls visit(record, first slab) for each of this thread block's runs of slabs, a slab a warp.
template <class Visit>
GC_DEVICE void for_slabs(const Task& t, Visit visit) {
  const i64 warps = blockDim.x / kWarp, runs = (t.slabs + warps - 1) / warps;
  for (i64 n = blockIdx.x; n < t.end * runs; n += gridDim.x) visit(n / runs, n % runs * warps);
}

// Counts a key's digit in a histogram. The lowest bin is what is left when all others are known, and
// the one that sparse gradients would crowd into: it is never counted.
GC_DEVICE void count_digit(u32* bins, u32 bin) {
  if (bin != 0) atomicAdd(&bins[bin], 1u);
}

// All threads: a shared histogram as zeros, and added to a record's.
GC_DEVICE void clear_bins(u32* bins, int count) {
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) bins[i] = 0;
  __syncthreads();
}
GC_DEVICE void add_bins(const u32* bins, int count, u32* to) {
  __syncthreads();
  for (int i = int(threadIdx.x); i < count; i += int(blockDim.x))
    if (bins[i] != 0) atomicAdd(&to[i], bins[i]);
  __syncthreads();  // before they are cleared
}

template <i64 Type>
GC_DEVICE void sparse_collect(const Task& t) {
  GC_SHARED(u32, bins);
  const SparseState at = sparse_state(t.format);
  const bool exact = is_exact(t);
  const Reader<Type> reader(t);
  for_slabs(t, [&](i64 r, i64 first_slab) {
    u32* const state = state_of(t, r);
    const i64 slab = first_slab + threadIdx.x / kWarp;
    const u32 threshold = state[at.threshold];
    u32* const keys = state + at.keys + slab * at.held;
    if (exact) clear_bins(bins, bins_of(0));
    u32 passed = 0, listed = 0, beyond = 0;  // of this lane, of the warp, of this lane
    if (slab < t.slabs) {
      for_steps(t, slab_of(t, r, slab), [&](const Stretch& s, i64 i) {
        const Read x = reader.four_at(s, i);
        for (int c = 0; c < 4; ++c) {
          const u32 key = order_key(bits_of(x.p.v[c]));
          const bool in = c < x.count, passes = in && key >= threshold;
          passed += passes;
          beyond += in && key >= kInfinity;
          if (!exact) continue;
          if (in) count_digit(bins, key >> shift_of(0));
          const u32 lanes = __ballot_sync(kAllLanes, passes);
          const u32 n = listed + u32(__popc(lanes & lanes_before()));
          if (passes && n < at.held) keys[n] = key;
          listed += u32(__popc(lanes));
        }
      });
      passed = sum_of_warp(passed);
      beyond = sum_of_warp(beyond);
      if (lane_of_thread() == 0) {
        if (exact) {
          state[at.found + slab] = passed;
          if (passed > 0) atomicAdd(&state[at.passed], passed);
        } else {
          state[at.above + slab] = passed;
          state[at.equal + slab] = beyond;
        }
      }
    }
    if (exact) add_bins(bins, bins_of(0), state + at.bins);
  });
}

// The first digits of the wanted-th largest key, and how many of the wanted share them.
struct Digits {
  u32 prefix, ties;
};

// One warp. The bin that holds the k-th largest, and what k is among its own.
GC_DEVICE Digits find_bin(const u32* bins, int count, u32 k) {
  const int each = count / kWarp, lane = lane_of_thread();
  u32 sum = 0;
  GC_UNROLL(8)
  for (int i = 0; i < each; ++i) sum += bins[lane * each + i];
  int winner = kWarp - 1;
  for (; winner > 0; --winner) {
    const u32 other = __shfl_sync(kAllLanes, sum, winner);
    if (k <= other) break;
    k -= other;
  }
  int bin = (winner + 1) * each - 1;
  for (; bin > winner * each && bins[bin] < k; --bin) k -= bins[bin];
  return {u32(bin), k};
}

// All threads; `told`: two words of shared memory.
GC_DEVICE Digits find_digits(const Task& t, const u32* state, int digits, u32* told) {
  const SparseState at = sparse_state(t.format);
  if (threadIdx.x < kWarp) {
    Digits d{0, u32(wanted_of(t, state[at.used]))};
    for (int digit = 0; digit < digits; ++digit) {
      const u32* const bins = state + at.bins + bins_before(digit);
      const Digits next = find_bin(bins, bins_of(digit), d.ties);
      d = {d.prefix << (digit == 0 ? 11 : 10) | next.prefix, next.ties};
    }
    if (threadIdx.x == 0) {
      told[0] = d.prefix;
      told[1] = d.ties;
    }
  }
  __syncthreads();
  const Digits d{told[0], told[1]};
  __syncthreads();
  return d;
}

// Calls use(key) for every key of a slab that may be among the wanted.
template <i64 Type, class Use>
GC_DEVICE void for_keys(const Task& t, const Reader<Type>& reader, i64 r, i64 slab, Use use) {
  const SparseState at = sparse_state(t.format);
  const u32* const state = state_of(t, r);
  const u32 found = state[at.found + slab];
  if (found <= at.held && state[at.passed] >= wanted_of(t, state[at.used])) {
    const u32* const keys = state + at.keys + slab * at.held;
    for (u32 i = u32(lane_of_thread()); i < found; i += kWarp) use(keys[i]);
    return;
  }
  for_steps(t, slab_of(t, r, slab), [&](const Stretch& s, i64 i) {
    const Read x = reader.four_at(s, i);
    for (int c = 0; c < 4; ++c)
      if (c < x.count) use(order_key(bits_of(x.p.v[c])));
  });
}

template <i64 Type>
GC_DEVICE void sparse_refine(const Task& t) {
  GC_SHARED(u32, bins);
  u32* const told = bins + 2048;
  const SparseState at = sparse_state(t.format);
  const Reader<Type> reader(t);
  const int digit = int(t.step), shift = shift_of(digit);
  for_slabs(t, [&](i64 r, i64 first_slab) {
    u32* const state = state_of(t, r);
    const i64 slab = first_slab + threadIdx.x / kWarp;
    const u32 prefix = find_digits(t, state, digit, told).prefix;
    clear_bins(bins, bins_of(digit));
    if (slab < t.slabs)
      for_keys(t, reader, r, slab, [&](u32 key) {
        if (key >> shift >> 10 == prefix) count_digit(bins, key >> shift & 1023u);
      });
    add_bins(bins, bins_of(digit), state + at.bins + bins_before(digit));
  });
}

template <i64 Type>
GC_DEVICE void sparse_count(const Task& t) {
  GC_SHARED(u32, told);
  const SparseState at = sparse_state(t.format);
  const Reader<Type> reader(t);
  for_slabs(t, [&](i64 r, i64 first_slab) {
    u32* const state = state_of(t, r);
    const i64 slab = first_slab + threadIdx.x / kWarp;
    const u32 threshold = find_digits(t, state, kDigits, told).prefix;
    if (slab >= t.slabs) return;
    u32 above = 0, equal = 0;
    for_keys(t, reader, r, slab, [&](u32 key) {
      above += key > threshold;
      equal += key == threshold;
    });
    above = sum_of_warp(above);
    equal = sum_of_warp(equal);
    if (lane_of_thread() != 0) return;
    state[at.above + slab] = above;
    state[at.equal + slab] = equal;
  });
}

}  // namespace gradcomm
