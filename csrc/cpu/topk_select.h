// Which elements of a chunk the sparse top-k sends (csrc/device/topk_sparse.cuh says the rules).
//
// An entry is one 64-bit integer, (order_key, index, sign) from the top bit down with the index
// inverted: sorted from the largest, keys fall and equal keys keep the order of their index.
#pragma once
#include "../device/topk_sparse.cuh"
#include "blocks.h"
#include "partition.h"

namespace gradcomm::GC_ISA {

GC_INLINE u64 make_entry(u32 bits, u32 index) {
  const u32 b = topk::canonical(bits);
  return (u64(b & kMagnitude) << 33) | (u64(~index) << 1) | (b >> 31);
}
GC_INLINE u32 entry_index(u64 entry) { return ~u32(entry >> 1); }
GC_INLINE u32 entry_bits(u64 entry) { return u32(entry >> 33) | (u32(entry & 1) << 31); }

// p = gain * g + e of one chunk, block by block, as often as it is asked for: nothing is written before
// keep(). g is the bucket, or the mean of the chunk (in block space) when that is given.
template <bool Feedback>
class ChunkReader {
 public:
  ChunkReader(const Args& a, i64 chunk, float gain, const float* mean, float* scratch)
      : a_(a),
        first_(chunk * a.span),
        gain_(gain),
        mean_(mean),
        buffer_(scratch),
        p_(scratch + a.block) {}

  float* residual() const { return a_.residual + first_ * a_.block; }
  i64 elements() const { return a_.span * a_.block; }
  i64 blocks() const { return a_.span; }
  u64 first_element() const { return u64(a_.block_begin + first_) * u64(a_.block); }

  // Calls use(block, p, count) for the blocks in use among [begin, end) of the chunk.
  template <class Use>
  void for_blocks(i64 begin, i64 end, Use use) {
    Cursor cursor(a_, first_ + begin);
    for (i64 b = begin; b < end; ++b) {
      const BlockRange r = cursor.at(first_ + b);
      if (r.count == 0) continue;
      read(b, r);
      use(b, p_, r.count);
    }
  }

  i64 used() const {
    i64 n = 0;
    Cursor cursor(a_, first_);
    for (i64 b = 0; b < a_.span; ++b) n += cursor.at(first_ + b).count;
    return n;
  }

  // order_key of the elements in use at every stride-th element of the chunk; returns how many.
  i64 sample(i64 stride, u32* keys) const {
    i64 n = 0;
    Cursor cursor(a_, first_);
    for (i64 i = 0; i < elements(); i += stride) {
      const i64 b = i / a_.block, at = i % a_.block;
      const BlockRange r = cursor.at(first_ + b);
      if (at >= r.count) continue;
      float x = source(i, r, at) * gain_;
      if constexpr (Feedback) x = x + residual()[i];
      keys[n++] = gradcomm::order_key(gradcomm::bits_of(x));
    }
    return n;
  }

  // For the blocks [begin, end): e <- p where p is finite, then left[i] for the entries from `next` on,
  // which are in the order of the blocks. Returns the first entry behind them.
  i64 keep(i64 begin, i64 end, const u64* entries, const float* left, i64 next, i64 count) {
    Cursor cursor(a_, first_ + begin);
    const i64 block = a_.block;
    const float gain = gain_;
    for (i64 b = begin; b < end; ++b) {
      const BlockRange r = cursor.at(first_ + b);
      if (r.count == 0) continue;
      const float* g = gradient(b, r);
      float* e = residual() + b * block;
      for (i64 i = 0; i < block; i += kWidth) {
        const f32n old = load<f32n>(e + i), x = load<f32n>(g + i) * gain + old;
        store(e + i, finite_or(x, old));
      }
      if (r.count < block) std::memset(e + r.count, 0, (block - r.count) * sizeof(float));
      for (; next < count; ++next) {
        const u64 at = u64(entry_index(entries[next])) - u64(b * block);  // wraps before the block
        if (at >= u64(block)) break;
        e[at] = left[next];
      }
    }
    return next;
  }

 private:
  const float* gradient(i64 b, BlockRange r) {
    return mean_ != nullptr ? mean_ + b * a_.block : read_block(a_, r, buffer_);
  }

  void read(i64 b, BlockRange r) {
    const i64 block = a_.block;
    const float gain = gain_;
    const float* g = gradient(b, r);
    const float* e = Feedback ? residual() + b * block : nullptr;
    float* p = p_;
    for (i64 i = 0; i < block; i += kWidth) {
      f32n x = load<f32n>(g + i) * gain;
      if constexpr (Feedback) x = x + load<f32n>(e + i);
      store(p + i, x);
    }
    if (r.count < block) std::memset(p + r.count, 0, (block - r.count) * sizeof(float));
  }

  float source(i64 i, BlockRange r, i64 at) const {
    if (mean_ != nullptr) return mean_[i];
    if (a_.dtype == kFloat32) return static_cast<const float*>(a_.source)[r.offset + at];
    const u16 h = static_cast<const u16*>(a_.source)[r.offset + at];
    return a_.dtype == kFloat16 ? gradcomm::float_of_f16(h) : gradcomm::float_of_bf16(h);
  }

  const Args& a_;
  i64 first_;
  float gain_;
  const float* mean_;
  float *buffer_, *p_;
};

// Scratch of a selection, laid out as sparse_scratch_floats (loops.h) counts it, and its result.
struct Selection {
  Selection(const Args& a, float* scratch) {
    room = sparse_candidates(a.format);
    entries = reinterpret_cast<u64*>(scratch);
    spare = entries + room;
    sent = scratch + 4 * room;
    keys = reinterpret_cast<u32*>(sent + a.format[3]);
    blocks = sent + a.format[3] + topk_sparse::kSampleMost;
    words = reinterpret_cast<u64*>(scratch + sparse_scratch_floats(a.format)) - (a.block + 63) / 64;
  }
  i64 room;  // entries that `entries` and `spare` hold
  u64 *entries, *spare;
  float* sent;    // k
  u32* keys;      // a sample, or a histogram
  i64 start = 0;  // the block that the entries begin with
  float* blocks;  // two blocks
  u64* words;     // a bit for each element of a block
};

// Which of the first `count` elements have an order_key of at least the threshold, as bits, 64 elements
// a word; and the largest order_key among them. p is zero behind count.
// Not inlined, so that nothing else competes for the registers.
__attribute__((noinline)) inline u32 find_passing(const float* p, i64 count, u32 threshold, u64* words) {
  i32n most{};
  const i32n below = i32n{} + (i32(threshold) - 1);  // below - key < 0: it passes
  const i64 whole = (count + kLanes - 1) / kLanes * kLanes;
  u64 word = 0;
  int shift = 0;
  for (i64 i = 0; i < whole; i += kWidth) {
    const i32n key = order_key(load<f32n>(p + i));
    most = max(most, key);
    word |= u64(signs_of(below - key)) << shift;
    shift += kWidth;
    if (shift == 64 || i + kWidth == whole) {
      *words++ = word;
      word = 0;
      shift = 0;
    }
  }
  if (count % 64 != 0) words[-1] &= (u64(1) << (count % 64)) - 1;
  return largest(most);
}

// Where collect() stands: `found` elements have passed, the first `room` of them are in the entries.
struct Collected {
  u64* entries;
  i64 room;
  u32 threshold;
  i64 ties;  // of the elements whose key is the threshold, so many more pass
  i64 found = 0;
  u32 largest = 0;
};

// Not inlined: see find_passing.
__attribute__((noinline)) inline void append_passing(const float* p, i64 count, u32 first_index,
                                                     const u64* words, Collected& to) {
  i64 found = to.found;
  for (i64 i = 0; i < count; i += 64) {
    for (u64 word = *words++; word != 0; word &= word - 1) {
      const i64 at = i + __builtin_ctzll(word);
      const u32 bits = gradcomm::bits_of(p[at]);
      if (gradcomm::order_key(bits) == to.threshold && to.ties-- <= 0) continue;
      if (found < to.room) to.entries[found] = make_entry(bits, first_index + u32(at));
      ++found;
    }
  }
  to.found = found;
}

// Appends what passes of blocks [begin, end), in order.
template <bool Feedback>
void collect(ChunkReader<Feedback>& chunk, i64 begin, i64 end, u64* words, Collected& to) {
  const i64 block = chunk.elements() / chunk.blocks();
  chunk.for_blocks(begin, end, [&](i64 b, const float* p, i64 count) {
    const u32 largest = find_passing(p, count, to.threshold, words);
    to.largest = largest > to.largest ? largest : to.largest;
    if (largest >= to.threshold) append_passing(p, count, u32(b * block), words, to);
  });
}

constexpr i64 kAllTies = i64(1) << 62;

// The key of the k-th largest element in use, by three passes of a radix histogram: what is left for
// inputs that a sample misjudges. `ties`: how many elements of that key belong to the k largest.
template <bool Feedback>
u32 exact_threshold(ChunkReader<Feedback>& chunk, i64 k, u32* histogram, i64& ties) {
  u32 prefix = 0;
  for (int shift = 20; shift >= 0; shift -= 10) {
    const int bits = shift == 20 ? 11 : 10;
    const u32 bins = 1u << bits;
    std::memset(histogram, 0, bins * sizeof(u32));
    chunk.for_blocks(0, chunk.blocks(), [=](i64, const float* p, i64 count) {
      for (i64 i = 0; i < count; ++i) {
        const u32 key = gradcomm::order_key(gradcomm::bits_of(p[i]));
        if (key >> shift >> bits == prefix) ++histogram[(key >> shift) & (bins - 1)];
      }
    });
    u32 bin = bins - 1;
    for (; i64(histogram[bin]) < k; --bin) k -= histogram[bin];
    prefix = prefix << bits | bin;
  }
  ties = k;
  return prefix;
}

template <bool Feedback>
i64 select_exact(ChunkReader<Feedback>& chunk, Selection& s, i64 wanted, i64 used, i64 sampled) {
  const i64 blocks = chunk.blocks();
  u32 threshold = 0;
  i64 ties = wanted;
  if (wanted < used) {
    // A threshold that about 1.5 times the wanted pass, and a second selection among those.
    const i64 rank = topk_sparse::sample_rank(sampled, wanted + wanted / 2, used) + 8;
    threshold = rank <= sampled ? kth_largest(s.keys, sampled, rank) : 0;
    threshold = threshold < 1 ? 1 : threshold;
    Collected passed{s.entries, s.room, threshold, kAllTies};
    collect(chunk, 0, blocks, s.words, passed);
    if (passed.found == wanted) return wanted;
    if (passed.found > wanted && passed.found <= s.room) {
      std::memcpy(s.spare, s.entries, passed.found * sizeof(u64));
      const u64 last = kth_largest(s.spare, passed.found, wanted);
      i64 n = 0;
      for (i64 i = 0; i < passed.found; ++i) {
        s.entries[n] = s.entries[i];
        n += s.entries[i] >= last;
      }
      return n;
    }
    if (passed.found < wanted && threshold == 1) {  // few are not zero: the first zeros go with them
      threshold = 0;
      ties = wanted - passed.found;
    } else {
      threshold = exact_threshold(chunk, wanted, s.keys, ties);
    }
  }
  Collected passed{s.entries, s.room, threshold, ties};
  collect(chunk, 0, blocks, s.words, passed);
  return passed.found;
}

template <bool Feedback>
i64 select_over_threshold(ChunkReader<Feedback>& chunk, Selection& s, i64 k, i64 wanted, i64 used,
                          i64 sampled, u64 key) {
  const i64 blocks = chunk.blocks();
  u32 threshold = 1;
  if (sampled > 0) {
    threshold = kth_largest(s.keys, sampled, topk_sparse::sample_rank(sampled, wanted, used));
    threshold = threshold < 1 ? 1 : threshold;
  }
  const i64 start = topk_sparse::start_block(key, chunk.first_element(), blocks);
  s.start = start;
  for (;;) {
    Collected passed{s.entries, k, threshold, kAllTies};
    collect(chunk, start, blocks, s.words, passed);
    collect(chunk, 0, start, s.words, passed);
    if (passed.largest < kInfinity || threshold >= kInfinity) return passed.found < k ? passed.found : k;
    threshold = kInfinity;
  }
}

// Fills s.entries with what the chunk sends, in the order of the record; returns how many.
template <bool Feedback>
i64 select(ChunkReader<Feedback>& chunk, const Args& a, Selection& s) {
  const i64 k = a.format[3], used = chunk.used(), wanted = k < used ? k : used;
  const i64 sampled = chunk.sample(topk_sparse::sample_stride(chunk.elements()), s.keys);
  if (a.format[5] == topk_sparse::kExact) return select_exact(chunk, s, wanted, used, sampled);
  return select_over_threshold(chunk, s, k, wanted, used, sampled, a.key);
}

}  // namespace gradcomm::GC_ISA
