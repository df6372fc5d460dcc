#include <cuda_runtime.h>

#include "run.h"
#include "sparse_launch.h"

namespace gradcomm {

bool has_kernels(const i64* format) { return has_kernels_for(format); }

i64 scratch_bytes(const Args& args, Stage stage, i64 records) {
  return words_of_scratch(args, stage, records) * i64(sizeof(u32));
}

const char* run(const Args& args, Stage stage, i64 records, int device, void* stream) {
  if (records == 0) return nullptr;
  // This library has a CUDA runtime of its own, which must know the device as torch's does.
  cudaError_t error = cudaSetDevice(device);
  int processors = 0;
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const auto enqueue = [&](Launch launch, Task& task) {
    if (error != cudaSuccess) return;
    void* arguments[] = {&task};
    error = cudaLaunchKernel(reinterpret_cast<const void*>(launch.kernel), dim3(launch.grid),
                             dim3(launch.threads), arguments, launch.shared_bytes,
                             static_cast<cudaStream_t>(stream));
  };
  if (error == cudaSuccess)
    for_launches(args, stage, records, 0, i64(processors) * kBlocksPerProcessor, enqueue);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace gradcomm
