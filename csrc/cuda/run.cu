#include <cuda_runtime.h>

#include "orthogonalize.cuh"
#include "run.h"
#include "sparse_launch.h"

namespace gradcomm {

using MatricesKernel = void (*)(const Matrices);
extern const MatricesKernel orthogonalize_kernel;

bool has_kernels(const i64* format) { return has_kernels_for(format); }

i64 scratch_bytes(const Args& args, Stage stage, i64 records) {
  return words_of_scratch(args, stage, records) * i64(sizeof(u32));
}

namespace {

// Calls enqueue(processors of the device), which returns an error; says what went wrong, or null.
template <class Enqueue>
const char* on_device(int device, Enqueue enqueue) {
  // This library has a CUDA runtime of its own, which must know the device as torch's does.
  cudaError_t error = cudaSetDevice(device);
  int processors = 0;
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = enqueue(i64(processors));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class Kernel, class Argument>
cudaError_t launch(Kernel kernel, unsigned grid, unsigned threads, unsigned shared_bytes, void* stream,
                   const Argument& argument) {
  void* arguments[] = {const_cast<Argument*>(&argument)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid), dim3(threads), arguments,
                          shared_bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace

const char* run(const Args& args, Stage stage, i64 records, int device, void* stream) {
  if (records == 0) return nullptr;
  return on_device(device, [&](i64 processors) {
    cudaError_t error = cudaSuccess;
    for_launches(args, stage, records, 0, processors * kBlocksPerProcessor,
                 [&](Launch l, const Task& task) {
                   if (error == cudaSuccess)
                     error = launch(l.kernel, l.grid, l.threads, l.shared_bytes, stream, task);
                 });
    return error;
  });
}

const char* run_orthogonalize(const Matrices& m, int device, void* stream) {
  if (m.count == 0 || m.rows == 0 || m.columns == 0) return nullptr;
  return on_device(device, [&](i64 processors) {
    const i64 most = processors * kBlocksPerProcessor;
    return launch(orthogonalize_kernel, unsigned(m.count < most ? m.count : most), kWarp * kWarpsMost,
                  kOrthogonalizeBytes, stream, m);
  });
}

}  // namespace gradcomm
