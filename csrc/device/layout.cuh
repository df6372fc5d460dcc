// Block space: how the elements of a bucket are cut into blocks.
//
// A layout is a table of segments. Each segment is a run of elements of the bucket (one parameter)
// and starts a block of its own; the last block of a segment may be partly empty. Blocks behind the
// last segment are padding. Block b of the layout owns the elements [b * block, (b + 1) * block) of
// block space, and that is where its residual lies.
#pragma once
#include "common.cuh"

namespace gradcomm {

struct Segment {
  i64 offset;       // first element, in the bucket
  i64 numel;        // how many; at least 1
  i64 first_block;  // first block; increasing, segments do not share a block
  i64 origin;       // of the random numbers: the counter of its first element
};

struct BlockRange {
  i64 offset;   // first element of the block, in the bucket
  i64 count;    // elements in use, 0 to block
  i64 counter;  // of the random numbers, of the block's first element
};

GC_INLINE BlockRange block_in_segment(const Segment& s, i64 block_index, i64 block) {
  const i64 begin = (block_index - s.first_block) * block;
  const i64 left = s.numel - begin;
  return BlockRange{s.offset + begin, left < 0 ? 0 : (left < block ? left : block), s.origin + begin};
}

// The last segment whose first block is not behind block_index, or -1.
GC_INLINE i64 find_segment(const Segment* segments, i64 count, i64 block_index) {
  i64 low = 0, high = count;
  while (low < high) {
    const i64 mid = (low + high) / 2;
    if (segments[mid].first_block <= block_index) low = mid + 1;
    else high = mid;
  }
  return low - 1;
}

}  // namespace gradcomm
