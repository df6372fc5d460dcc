// Orthonormal rows of small matrices: Cholesky QR twice (Yamamoto et al. 2015), in float64, of unit
// rows, the Gram matrix shifted; gradcomm/ops/reference/orthogonalize.py is the same in PyTorch.
//
// A thread block takes a matrix and reads it three times, a tile of columns at once: for the Gram matrix
// of p; for that of y = M p, M being what the first Cholesky factor makes of p's rows; and for M p, M
// then being of both factors, which goes where p was. M stays in shared memory, y is never stored.
// Sums have a fixed order: 32 partial sums a tile, folded 16, 8, 4, 2, 1, tile after tile.
#pragma once
#include "matrices.cuh"
#include "warp.cuh"

namespace gradcomm {

constexpr int kPanel = 2048;  // elements of a tile: as many columns as fit
constexpr int kSquare = int(kRowsMost * kRowsMost);
constexpr int kOrthogonalizeBytes = kPanel * 12 + 2 * kSquare * 8;
constexpr double kShift = 1e-12;

struct Panel {
  double *gram, *m;  // rows x rows; gram: the lower triangle, or its Cholesky factor
  double* y;         // rows x width
  float* p;          // rows x width
  int rows, width;
};

// One warp, a lane a row: gram <- its lower Cholesky factor.
GC_DEVICE void factorize(const Panel& x) {
  const int row = lane_of_thread(), n = x.rows;
  for (int j = 0; j < n; ++j) {
    double s = 0.0;
    if (row >= j && row < n) {
      s = x.gram[row * n + j];
      for (int k = 0; k < j; ++k) s = s - x.gram[row * n + k] * x.gram[j * n + k];
    }
    const double pivot = sqrt(__shfl_sync(kAllLanes, s, j));
    if (row >= j && row < n) x.gram[row * n + j] = row == j ? pivot : s / pivot;
    __syncwarp();
  }
}

// One warp, a lane a column: m <- (the factor in gram)^-1 m.
GC_DEVICE void solve(const Panel& x) {
  const int column = lane_of_thread(), n = x.rows;
  if (column < n)
    for (int i = 0; i < n; ++i) {
      double s = x.m[i * n + column];
      for (int k = 0; k < i; ++k) s = s - x.gram[i * n + k] * x.m[k * n + column];
      x.m[i * n + column] = s / x.gram[i * n + i];
    }
  __syncwarp();
}

// One warp. From the Gram matrix of p: m <- diag(1 / norms), 0 for a row of zeros, and gram <- m gram m.
GC_DEVICE void scale_rows(const Panel& x) {
  const int row = lane_of_thread(), n = x.rows;
  double inverse = 0.0;
  if (row < n) {
    const double square = x.gram[row * n + row];
    inverse = square == 0.0 ? 0.0 : 1.0 / sqrt(square);
    for (int j = 0; j < n; ++j) x.m[row * n + j] = j == row ? inverse : 0.0;
  }
  for (int j = 0; j < n; ++j) {
    const double other = __shfl_sync(kAllLanes, inverse, j);
    if (row >= j && row < n) x.gram[row * n + j] = x.gram[row * n + j] * inverse * other;
  }
  __syncwarp();
}

// All threads: gram <- gram + y y^T over these columns.
GC_DEVICE void add_gram(const Panel& x, int columns) {
  const int warp = int(threadIdx.x) / kWarp, warps = int(blockDim.x) / kWarp;
  int pair = 0;
  for (int i = 0; i < x.rows; ++i)
    for (int j = 0; j <= i; ++j) {
      if (pair++ % warps != warp) continue;
      double sum = 0.0;
      for (int c = lane_of_thread(); c < columns; c += kWarp)
        sum = sum + x.y[i * x.width + c] * x.y[j * x.width + c];
      for (int width = kWarp / 2; width > 0; width /= 2)
        sum = sum + __shfl_xor_sync(kAllLanes, sum, width);
      if (lane_of_thread() == 0) x.gram[i * x.rows + j] = x.gram[i * x.rows + j] + sum;
    }
}

GC_DEVICE void orthogonalize(const Matrices& t) {
  GC_SHARED(double, memory);
  Panel x{memory, memory + kSquare, memory + 2 * kSquare, nullptr, int(t.rows), 0};
  x.p = reinterpret_cast<float*>(x.y + kPanel);
  x.width = kPanel / x.rows / kWarp * kWarp;
  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  for (i64 n = blockIdx.x; n < t.count; n += gridDim.x) {
    float* const data = t.data + n * t.rows * t.columns;
    for (int pass = 0; pass < 3; ++pass) {
      for (int i = thread; i < x.rows * x.rows; i += threads)
        if (pass < 2) x.gram[i] = 0.0;
      for (i64 begin = 0; begin < t.columns; begin += x.width) {
        const int columns = int(t.columns - begin < x.width ? t.columns - begin : x.width);
        __syncthreads();  // before the tile is written again
        for (int i = thread; i < x.rows * x.width; i += threads) {
          const int row = i / x.width, c = i % x.width;
          if (c < columns) x.p[i] = data[row * t.columns + begin + c];
        }
        __syncthreads();
        for (int i = thread; i < x.rows * x.width; i += threads) {
          const int row = i / x.width, c = i % x.width;
          if (c >= columns) continue;
          double y = pass == 0 ? double(x.p[i]) : 0.0;
          if (pass > 0)
            for (int j = 0; j <= row; ++j) y = y + x.m[row * x.rows + j] * double(x.p[j * x.width + c]);
          if (pass < 2) x.y[i] = y;
          else data[row * t.columns + begin + c] = float(y);
        }
        __syncthreads();
        if (pass < 2) add_gram(x, columns);
      }
      __syncthreads();
      if (pass < 2 && thread < kWarp) {
        if (pass == 0) scale_rows(x);
        if (thread < x.rows) x.gram[thread * x.rows + thread] += kShift;
        __syncwarp();
        factorize(x);
        solve(x);
      }
      __syncthreads();
    }
  }
}

}  // namespace gradcomm
