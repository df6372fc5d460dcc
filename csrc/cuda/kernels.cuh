// The kernels of a format, by names that need no demangling: gradcomm_<format>_<stage>[_<type>].
#pragma once
#include "blocks.cuh"

namespace gradcomm {

using Kernel = void (*)(const Task);

// By type of the bucket, as WireType numbers them; reduce_encode knows no bucket.
struct Kernels {
  Kernel encode[3], decode_mean[3], reduce_encode;
  Kernel mask = nullptr;  // where a format has one
};

// Those of the sparse format, whose encode is several launches (sparse_select.cuh).
struct SparseKernels {
  Kernel sample[3], collect[3], refine[3], count[3], place[3], decode_mean[3], mask, segments;
};

}  // namespace gradcomm

// `blocks` thread blocks a processor: 3 leave a thread at most 80 registers, 2 leave it 128.
#define GC_KERNEL_OF(blocks, name, body)                                              \
  extern "C" __global__ void GC_BOUNDS(gradcomm::kWarp* gradcomm::kWarpsMost, blocks) \
      gradcomm_##name(const GC_GRID_CONSTANT gradcomm::Task t) {                      \
    body(t);                                                                          \
  }
#define GC_KERNEL(name, body) GC_KERNEL_OF(3, name, body)

#define GC_OF_TYPES(name, loop, format)                                               \
  GC_KERNEL(name##_float32, (gradcomm::loop<gradcomm::format, gradcomm::kFloat32>))   \
  GC_KERNEL(name##_float16, (gradcomm::loop<gradcomm::format, gradcomm::kFloat16>))   \
  GC_KERNEL(name##_bfloat16, (gradcomm::loop<gradcomm::format, gradcomm::kBFloat16>))

// Run-time compilation looks kernels up by name; the others by this table.
#if defined(__CUDACC_RTC__)
#define GC_TABLE(name, mask)
#else
#define GC_TABLE(name, mask)                                                         \
  namespace gradcomm {                                                               \
  extern const Kernels name##_kernels;                                               \
  const Kernels name##_kernels{                                                      \
      {gradcomm_##name##_encode_float32, gradcomm_##name##_encode_float16,           \
       gradcomm_##name##_encode_bfloat16},                                           \
      {gradcomm_##name##_decode_mean_float32, gradcomm_##name##_decode_mean_float16, \
       gradcomm_##name##_decode_mean_bfloat16},                                      \
      gradcomm_##name##_reduce_encode,                                               \
      mask};                                                                         \
  }
#endif

#define GC_KERNELS(name, format)                                                      \
  GC_OF_TYPES(name##_encode, encode_blocks, format)                                   \
  GC_OF_TYPES(name##_decode_mean, decode_mean_blocks, format)                         \
  GC_KERNEL(name##_reduce_encode, (gradcomm::reduce_encode_blocks<gradcomm::format>)) \
  GC_TABLE(name, nullptr)

#define GC_KERNELS_AND_MASK(name, format)                                             \
  GC_OF_TYPES(name##_encode, encode_blocks, format)                                   \
  GC_OF_TYPES(name##_decode_mean, decode_mean_blocks, format)                         \
  GC_KERNEL(name##_reduce_encode, (gradcomm::reduce_encode_blocks<gradcomm::format>)) \
  GC_KERNEL(name##_mask, (gradcomm::mask_blocks<gradcomm::format>))                   \
  GC_TABLE(name, gradcomm_##name##_mask)
