// The last launch of a sparse encode: every element is read once more; what is sent goes to its entry,
// what is not stays in the residual.
//
// Entries that share a scale may come from several thread blocks. Each counts what it has put in place
// of such a group; the one that completes a group writes its values, and what is left of them in the
// residual. By then all that reads those elements has been read: a slab reports when it is done.
#pragma once
#include "sparse_select.cuh"

namespace gradcomm {

// What a record sends: keys over `over`, and the first `ties` of those that are `over`; `entries` in
// all at most.
struct Sending {
  u32 over, ties, entries;
  bool by_equal;  // slabs count what is sent in `equal`, in place of `above` and `equal`
};

// All threads; `told`: kPlaceWords words of shared memory. The counts of the slabs before `slab`.
struct Before {
  u32 above, equal;
};
GC_DEVICE Sending find_sending(const Task& t, const u32* state, i64 slab, Before& before, u32* told) {
  const SparseState at = sparse_state(t.format);
  const u32 used = state[at.used], k = u32(t.format[3]);
  u32 above = 0, equal = 0, all_above = 0, all_equal = 0;
  for (i64 s = threadIdx.x; s < t.slabs; s += blockDim.x) {
    const u32 a = state[at.above + s], e = state[at.equal + s];
    all_above += a;
    all_equal += e;
    if (s < slab) {
      above += a;
      equal += e;
    }
  }
  if (threadIdx.x < 4) told[threadIdx.x] = 0;
  __syncthreads();
  above = sum_of_warp(above);
  equal = sum_of_warp(equal);
  all_above = sum_of_warp(all_above);
  all_equal = sum_of_warp(all_equal);
  if (lane_of_thread() == 0) {
    atomicAdd(&told[0], above);
    atomicAdd(&told[1], equal);
    atomicAdd(&told[2], all_above);
    atomicAdd(&told[3], all_equal);
  }
  __syncthreads();
  before = {told[0], told[1]};
  const u32 passing = told[2], beyond = told[3];
  __syncthreads();
  if (is_exact(t)) {
    const Digits d = find_digits(t, state, kDigits, told);
    return {d.prefix, d.ties, u32(wanted_of(t, used)), false};
  }
  const u32 threshold = state[at.threshold];
  const bool by_equal = beyond > 0 && threshold < kInfinity;  // no quota may hide them
  const u32 sent = by_equal ? beyond : passing;
  return {(by_equal ? kInfinity : threshold) - 1, 0, sent < k ? sent : k, by_equal};
}

// The entries of so many elements over, and so many at the threshold.
GC_DEVICE u32 entries_of(const Sending& sending, u32 above, u32 equal) {
  if (sending.by_equal) return equal < sending.entries ? equal : sending.entries;
  const u32 n = above + (equal < sending.ties ? equal : sending.ties);
  return n < sending.entries ? n : sending.entries;
}

template <i64 Type>
struct Placer {
  const Task& t;
  const Reader<Type> reader;
  const SparseState at = sparse_state(t.format);
  const topk_sparse::Wire w = topk_sparse::wire(t.format);

  explicit GC_DEVICE Placer(const Task& task) : t(task), reader(task) {}

  // One warp: a slab, with so many elements over and at the threshold before it.
  GC_DEVICE void place_slab(i64 r, i64 slab, const Sending& sending, u32 above, u32 equal) const {
    const i64 first = first_element(t, r);
    u32* const state = state_of(t, r);
    u8* const record = t.payload + r * t.record;
    const u32 least = sending.over + (sending.ties > 0 ? 0 : 1);
    for_steps(t, slab_of(t, r, slab), [&](const Stretch& s, i64 i) {
      const Read x = reader.four_at(s, i);
      u32 sent = 0;  // a bit for each of the four
      u32 key[4];
      bool any = false;
      for (int c = 0; c < 4; ++c) {
        key[c] = order_key(bits_of(x.p.v[c]));
        any = any || (c < x.count && key[c] >= least);
      }
      if (__ballot_sync(kAllLanes, any) != 0) {
        // Elements lie four a lane: those before this one are in the lanes before, and here.
        u32 over = above, at_it = equal, all_over = 0, all_at_it = 0;
        for (int c = 0; c < 4; ++c) {
          const u32 o = __ballot_sync(kAllLanes, c < x.count && key[c] > sending.over);
          const u32 e = __ballot_sync(kAllLanes, c < x.count && key[c] == sending.over);
          over += u32(__popc(o & lanes_before()));
          at_it += u32(__popc(e & lanes_before()));
          all_over += u32(__popc(o));
          all_at_it += u32(__popc(e));
        }
        for (int c = 0; c < 4; ++c) {
          if (c >= x.count) break;
          const bool is_over = key[c] > sending.over, is_at_it = key[c] == sending.over;
          const u32 n = over + (at_it < sending.ties ? at_it : sending.ties);
          if ((is_over || (is_at_it && at_it < sending.ties)) && n < sending.entries) {
            store_as(record + w.indices + 4 * i64(n), u32(i + c - first));
            store_as(state + at.sent + n, x.p.v[c]);
            sent |= 1u << c;
          }
          over += is_over;
          at_it += is_at_it;
        }
        above += all_over;
        equal += all_at_it;
      }
      if (reader.residual != nullptr) keep(s, i, x, sent);
    });
  }

  // e <- p where p is finite and not sent, and 0 behind the elements in use.
  GC_DEVICE void keep(const Stretch& s, i64 i, const Read& x, u32 sent) const {
    float* const e = reader.residual + i;
    Four y = x.p;
    for (int c = 0; c < 4; ++c)
      if ((bits_of(y.v[c]) & kMagnitude) >= kInfinity) y.v[c] = x.old.v[c];
    if (x.count == 4 && sent == 0 && reader.aligned) {
      store_as(e, y);
      return;
    }
    for (int c = 0; c < 4; ++c)
      if (i + c < s.padded && !(sent >> c & 1u)) e[c] = c < x.count ? y.v[c] : 0.0f;
  }

  // All threads: reports the entries [begin, end), and writes the groups that they complete.
  GC_DEVICE void report(i64 r, u32 begin, u32 end, u32 entries) const {
    constexpr u32 kGroup = u32(topk_sparse::kScaled);
    u32* const state = state_of(t, r);
    __threadfence();
    __syncthreads();
    for (u32 g = begin / kGroup + threadIdx.x / kWarp; g * kGroup < end; g += blockDim.x / kWarp) {
      const u32 first = g * kGroup, behind = first + kGroup;
      const u32 low = begin > first ? begin : first, high = end < behind ? end : behind;
      u32 done = 0;
      if (lane_of_thread() == 0) done = atomicAdd(&state[at.groups + g], high - low) + high - low;
      done = __shfl_sync(kAllLanes, done, 0);
      const u32 size = entries - first < kGroup ? entries - first : kGroup;
      if (done != size) continue;
      __threadfence();
      write_group(r, first, size);
    }
    __syncthreads();
  }

  // One warp: the values of a group, once all its entries are in place.
  GC_DEVICE void write_group(i64 r, u32 first, u32 size) const {
    const float* const sent = reinterpret_cast<const float*>(state_of(t, r) + at.sent) + first;
    u8* const record = t.payload + r * t.record;
    u32 largest = 0;
    float scale = 0.0f;
    if (w.type == kInt8) {
      for (u32 i = u32(lane_of_thread()); i < size; i += kWarp) {
        const u32 key = order_key(bits_of(sent[i]));
        largest = key > largest ? key : largest;
      }
      largest = largest_of_warp(largest);
      scale = topk::int8_scale(largest);
      if (lane_of_thread() == 0) store_as(record + first / u32(topk_sparse::kScaled) * 4, scale);
    }
    const float inverse = topk::int8_inverse(scale);
    for (u32 i = u32(lane_of_thread()); i < size; i += kWarp) {
      const i64 n = i64(first) + i;
      const float x = sent[i];
      u8* const value = record + w.values + n * wire_size(w.type);
      bool finite = (bits_of(x) & kMagnitude) < kInfinity;
      float left = 0.0f;
      if (w.type == kFloat32) {
        store_as(value, topk::canonical(bits_of(x)));
      } else if (w.type == kFloat16) {
        const u16 h = topk::saturated_f16(x);
        store_as(value, h);
        left = x - float_of_f16(h);
      } else {
        finite = largest < kInfinity;
        const float q = finite ? topk::int8_quantum(x, inverse) : 0.0f;
        *value = u8(i8(q));
        left = x - q * scale;
      }
      if (reader.residual != nullptr && finite)
        reader.residual[first_element(t, r) + load_as<u32>(record + w.indices + 4 * n)] = left;
    }
  }
};

template <i64 Type>
GC_DEVICE void sparse_place(const Task& t) {
  GC_SHARED(u32, told);
  const Placer<Type> placer(t);
  const SparseState at = sparse_state(t.format);
  for_slabs(t, [&](i64 r, i64 first_slab) {
    const u32* const state = state_of(t, r);
    if (state[at.used] == 0) return;
    const i64 warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
    Before before;
    const Sending sending = find_sending(t, state, first_slab, before, told);
    u32 above = before.above, equal = before.equal, mine_above = 0, mine_equal = 0;
    for (i64 n = 0; n < warps && first_slab + n < t.slabs; ++n) {
      if (n == warp) {
        mine_above = above;
        mine_equal = equal;
      }
      above += state[at.above + first_slab + n];
      equal += state[at.equal + first_slab + n];
    }
    if (first_slab + warp < t.slabs)
      placer.place_slab(r, first_slab + warp, sending, sending.by_equal ? mine_equal : mine_above,
                        sending.by_equal ? 0 : mine_equal);
    placer.report(r, entries_of(sending, before.above, before.equal), entries_of(sending, above, equal),
                  sending.entries);
  });
}

}  // namespace gradcomm
