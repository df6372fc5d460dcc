// Kernels with a mistake each, and a right one: what the emulator must say of them.
#include "simt.h"

#include <cstdio>

#include <cstdlib>

#include "../../csrc/cuda/target.cuh"

namespace {

constexpr unsigned kAll = 0xffffffffu;

// Each thread's element, and that of the thread behind it, through shared memory.
template <bool Barrier>
void rotate(const float* in, float* out) {
  GC_SHARED(float, tile);
  const unsigned i = threadIdx.x, n = blockDim.x;
  tile[i] = in[i];
  if (Barrier) __syncthreads();
  out[i] = tile[(i + 1) % n];
}

void sum_of_warp(const float* in, float* out, unsigned mask) {
  float x = in[threadIdx.x];
  for (int width = 16; width > 0; width /= 2) x += __shfl_xor_sync(mask, x, width);
  out[threadIdx.x] = x;
}

void off_by_one(const float* in, float* out) {
  GC_SHARED(float, tile);
  tile[threadIdx.x + 1] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

void exits_early(const float* in, float* out) {
  if (threadIdx.x == 7) return;
  sum_of_warp(in, out, kAll);
}

void diverges(const float* in, float* out) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 2 == 0) x += __shfl_xor_sync(kAll, x, 1);
  else x -= __shfl_xor_sync(kAll, x, 1);
  out[threadIdx.x] = x;
}

void barrier_in_a_branch(const float* in, float* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
  if (threadIdx.x >= 32) __syncwarp(0x0000ffffu << (threadIdx.x % 32 < 16 ? 0 : 16));
}

char message[512];

}  // namespace

extern "C" const char* simt_faulty(int which, int order, const float* in, float* out) {
  const std::string fault = simt::run({1, 64, 64 * sizeof(float), simt::Order(order), 3}, [&] {
    switch (which) {
      case 0: return rotate<true>(in, out);
      case 1: return rotate<false>(in, out);
      case 2: return sum_of_warp(in, out, kAll);
      case 3: return sum_of_warp(in, out, 0x7fffffffu);
      case 4: return off_by_one(in, out);
      case 5: return exits_early(in, out);
      case 6: return diverges(in, out);
      case 7: return barrier_in_a_branch(in, out);
    }
  });
  std::snprintf(message, sizeof(message), "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}
