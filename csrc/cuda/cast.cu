#include "cast.cuh"
#include "kernels.cuh"

GC_KERNELS(cast, Cast)
