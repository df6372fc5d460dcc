// What the sparse top-k needs from the standard library's algorithms. loops.cpp must not instantiate
// them (see there), so they are compiled here once, for any processor.
#pragma once
#include "../device/common.cuh"

namespace gradcomm {

// The k-th largest of n entries, 1 <= k <= n. Reorders them.
u64 kth_largest(u64* entries, i64 n, i64 k);
u32 kth_largest(u32* entries, i64 n, i64 k);

}  // namespace gradcomm
