#include "kernels.cuh"
#include "topk_block.cuh"

GC_KERNELS_AND_MASK(topk_block, TopKBlock)
