#include "kernels.cuh"
#include "topk_block.cuh"

GC_KERNELS(topk_block, TopKBlock)
