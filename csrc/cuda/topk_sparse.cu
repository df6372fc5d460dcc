#include "kernels.cuh"
#include "sparse_decode.cuh"
#include "sparse_place.cuh"

#define GC_SPARSE_OF_TYPES(blocks, name)                                                              \
  GC_KERNEL_OF(blocks, topk_sparse_##name##_float32, (gradcomm::sparse_##name<gradcomm::kFloat32>))   \
  GC_KERNEL_OF(blocks, topk_sparse_##name##_float16, (gradcomm::sparse_##name<gradcomm::kFloat16>))   \
  GC_KERNEL_OF(blocks, topk_sparse_##name##_bfloat16, (gradcomm::sparse_##name<gradcomm::kBFloat16>))

GC_SPARSE_OF_TYPES(3, sample)
GC_SPARSE_OF_TYPES(3, collect)
GC_SPARSE_OF_TYPES(3, refine)
GC_SPARSE_OF_TYPES(3, count)
GC_SPARSE_OF_TYPES(2, place)
GC_SPARSE_OF_TYPES(3, decode_mean)
GC_KERNEL(topk_sparse_mask, (gradcomm::sparse_mask))
GC_KERNEL(topk_sparse_segments, (gradcomm::sparse_segments))

#if !defined(__CUDACC_RTC__)
#define GC_SPARSE_TABLE(name)                                                    \
  {gradcomm_topk_sparse_##name##_float32, gradcomm_topk_sparse_##name##_float16, \
   gradcomm_topk_sparse_##name##_bfloat16}
namespace gradcomm {
extern const SparseKernels topk_sparse_kernels;
const SparseKernels topk_sparse_kernels{GC_SPARSE_TABLE(sample),   GC_SPARSE_TABLE(collect),
                                        GC_SPARSE_TABLE(refine),   GC_SPARSE_TABLE(count),
                                        GC_SPARSE_TABLE(place),    GC_SPARSE_TABLE(decode_mean),
                                        gradcomm_topk_sparse_mask, gradcomm_topk_sparse_segments};
}  // namespace gradcomm
#endif
