#include "kernels.cuh"
#include "quantize.cuh"

GC_KERNELS(quantize2, Quantize2)
GC_KERNELS(quantize4, Quantize4)
GC_KERNELS(quantize8, Quantize8)
