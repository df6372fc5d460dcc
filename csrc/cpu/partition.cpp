#include "partition.h"

#include <algorithm>
#include <functional>

namespace gradcomm {

u64 kth_largest(u64* entries, i64 n, i64 k) {
  std::nth_element(entries, entries + (k - 1), entries + n, std::greater<u64>());
  return entries[k - 1];
}

u32 kth_largest(u32* entries, i64 n, i64 k) {
  std::nth_element(entries, entries + (k - 1), entries + n, std::greater<u32>());
  return entries[k - 1];
}

}  // namespace gradcomm
