#include "kernels.cuh"
#include "twobit.cuh"

GC_KERNELS(twobit, TwoBit)
