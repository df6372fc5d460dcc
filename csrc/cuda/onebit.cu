#include "kernels.cuh"
#include "onebit.cuh"

GC_KERNELS(onebit, OneBit)
