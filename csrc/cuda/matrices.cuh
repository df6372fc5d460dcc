// What the kernel of orthogonalize.cuh is told.
#pragma once
#include "../device/common.cuh"

namespace gradcomm {

constexpr i64 kRowsMost = 32;  // of a matrix that the kernel takes

struct Matrices {
  float* data;  // [count, rows, columns]
  i64 count, rows, columns;
};

}  // namespace gradcomm
