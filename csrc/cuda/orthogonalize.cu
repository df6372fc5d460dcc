#include "orthogonalize.cuh"

extern "C" __global__ void GC_BOUNDS(gradcomm::kWarp* gradcomm::kWarpsMost, 2)
    gradcomm_orthogonalize(const gradcomm::Matrices t) {
  gradcomm::orthogonalize(t);
}

#if !defined(__CUDACC_RTC__)
namespace gradcomm {
using MatricesKernel = void (*)(const Matrices);
extern const MatricesKernel orthogonalize_kernel;
const MatricesKernel orthogonalize_kernel = gradcomm_orthogonalize;
}  // namespace gradcomm
#endif
