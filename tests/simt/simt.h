// A small SIMT machine: the CUDA kernels on a CPU, compiled by g++. Every lane is a fiber; it runs
// until it meets a collective (__syncthreads, __syncwarp, __shfl_*_sync, __ballot_sync), where it
// waits until all lanes that must take part have come. A lane that is missing, has exited, or came to
// another call is an error. Between collectives lanes run in a chosen order: what depends on it was not
// synchronized.
//
// Shared memory is filled with NaNs before each thread block and has fences around it that are
// checked behind it. Under AddressSanitizer the fences are poisoned, so that reading them is caught
// as well.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#define GC_SIMT 1
#define __global__
#define __device__
#define __host__

namespace simt {

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

enum class Order { kForwards, kBackwards, kRandom };

struct Grid {
  unsigned blocks, threads;
  std::size_t shared_bytes;
  Order order;
  uint64_t seed;
};

// Runs body() in every thread; returns what went wrong, or nothing.
std::string run(const Grid& grid, const std::function<void()>& body);

void* shared_memory();

struct Here {
  Dim thread, block, threads, blocks;
};
const Here& here();

enum class Call { kSyncThreads, kSyncWarp, kShuffle, kBallot };

// Waits for the lanes of `mask` (of all threads: kSyncThreads) and returns the value that lane
// `source` of this warp gave; of kBallot a bit for each lane of the mask whose value is not 0.
uint64_t meet(Call call, unsigned mask, uint64_t value, int source, int line);

template <class T>
T shuffle(unsigned mask, T x, int source, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &x, sizeof(x));
  word = meet(Call::kShuffle, mask, word, source, line);
  std::memcpy(&x, &word, sizeof(x));
  return x;
}

}  // namespace simt

#define threadIdx (simt::here().thread)
#define blockIdx (simt::here().block)
#define blockDim (simt::here().threads)
#define gridDim (simt::here().blocks)

inline void __syncthreads(int line = __builtin_LINE()) {
  simt::meet(simt::Call::kSyncThreads, 0, 0, 0, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  simt::meet(simt::Call::kSyncWarp, mask, 0, int(threadIdx.x % 32), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int line = __builtin_LINE()) {
  return simt::shuffle(mask, x, int(threadIdx.x % 32) ^ lanes, line);
}
template <class T>
T __shfl_sync(unsigned mask, T x, int source, int line = __builtin_LINE()) {
  return simt::shuffle(mask, x, source, line);
}
inline unsigned __ballot_sync(unsigned mask, bool x, int line = __builtin_LINE()) {
  return unsigned(simt::meet(simt::Call::kBallot, mask, x, int(threadIdx.x % 32), line));
}

// Lanes take turns and thread blocks run one after another: an atomic is a plain operation, and a
// fence has nothing to order.
template <class T>
T atomicAdd(T* at, T x) {
  const T old = *at;
  *at = old + x;
  return old;
}
inline void __threadfence() {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
