// What the kernels take from CUDA, and what stands for it in the emulator (tests/simt/simt.h, which
// defines GC_SIMT and the names of CUDA that appear in csrc/cuda).
#pragma once
#include "../device/common.cuh"

#if defined(GC_SIMT)
#define GC_DEVICE inline
#define GC_GRID_CONSTANT
#define GC_UNROLL(n)
#define GC_SHARED(type, name) type* const name = static_cast<type*>(simt::shared_memory())
#define GC_BOUNDS(threads, blocks)
#else
#define GC_DEVICE __device__ __forceinline__
#define GC_GRID_CONSTANT __grid_constant__
#define GC_PRAGMA(x) _Pragma(#x)
#define GC_UNROLL(n) GC_PRAGMA(unroll n)
#define GC_SHARED(type, name) extern __shared__ type name[]
#define GC_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#endif
