// PowerSGD's passes over a matrix (Vogels et al. 2019, algorithm 1), each once over memory:
//
//   project       M = gain G + E, into E;  P = M Q       rows are independent of each other
//   back_project  Q = M^T P                              columns are
//
// Factors lie as rows: P as [rank, n], Q as [rank, m]. Sums are of float32, in an order that depends on
// the shape alone.
#pragma once
#include "loops.h"
#include "simd.h"

namespace gradcomm::GC_ISA {

// Elements from 1e37 up count as not finite: they stay out of M, whose row in P becomes NaN.
constexpr float kLargest = 1e37f;
constexpr int kRanks = 4;  // of the factors that are worked on at once

// M += gain G of one row, lanes of elements that count, else 0.
struct Taken {
  f32x16 m;
  i32x16 good;
};
GC_INLINE Taken take(f32x16 g, float gain, f32x16 e) {
  const f32x16 x = g * gain;
  const i32x16 magnitude = (i32x16)(bits_of(x) & kMagnitude);
  const i32x16 good = (i32x16)(magnitude < i32(gradcomm::bits_of(kLargest)));
  return {select(good, x + e, e), good};
}

// M += gain G in some rows, and which of them counted whole.
template <int Rows>
GC_INLINE void add_rows(const LowRank& a, i64 row, bool* good) {
  for (int r = 0; r < Rows; ++r) {
    const float* g = a.gradient + (row + r) * a.m;
    float* e = a.matrix + (row + r) * a.m;
    i32x16 all = (i32x16)(splat(0u) - 1u);
    i64 j = 0;
    for (; j + kLanes <= a.m; j += kLanes) {
      const Taken t = take(load<f32x16>(g + j), a.gain, load<f32x16>(e + j));
      store(e + j, t.m);
      all &= t.good;
    }
    good[r] = largest((u32x16)~all) == 0;
    for (; j < a.m; ++j) {
      const float x = g[j] * a.gain;
      if ((gradcomm::bits_of(x) & kMagnitude) < gradcomm::bits_of(kLargest)) e[j] = x + e[j];
      else good[r] = false;
    }
  }
}

// The rows are still in the cache.
template <int Rows, int Ranks>
GC_INLINE void dot_rows(const LowRank& a, i64 row, int first, const bool* good) {
  f32x16 sums[Rows][Ranks]{};
  const float* m = a.matrix + row * a.m;
  const float* q = a.q + first * a.m;
  i64 j = 0;
  for (; j + kLanes <= a.m; j += kLanes) {
    f32x16 x[Rows];
    for (int r = 0; r < Rows; ++r) x[r] = load<f32x16>(m + r * a.m + j);
    for (int k = 0; k < Ranks; ++k) {
      const f32x16 y = load<f32x16>(q + k * a.m + j);
      for (int r = 0; r < Rows; ++r) sums[r][k] += x[r] * y;
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int k = 0; k < Ranks; ++k) {
      float sum = fold(sums[r][k], [](auto x, auto y) { return x + y; });
      for (i64 rest = j; rest < a.m; ++rest) sum += m[r * a.m + rest] * q[k * a.m + rest];
      a.p[(first + k) * a.n + row + r] = good[r] ? sum : gradcomm::float_of(kNaN);
    }
}

template <int Rows>
void project_rows(const LowRank& a, i64 row) {
  bool good[Rows];
  add_rows<Rows>(a, row, good);
  int first = 0;
  for (; first + kRanks <= a.rank; first += kRanks) dot_rows<Rows, kRanks>(a, row, first, good);
  for (; first + 2 <= a.rank; first += 2) dot_rows<Rows, 2>(a, row, first, good);
  for (; first < a.rank; ++first) dot_rows<Rows, 1>(a, row, first, good);
}

inline void project(const LowRank& a, i64 begin, i64 end) {
  constexpr int kRows = 4;
  i64 row = begin;
  for (; row + kRows <= end; row += kRows) project_rows<kRows>(a, row);
  for (; row < end; ++row) project_rows<1>(a, row);
}

template <int Ranks>
void back_project_ranks(const LowRank& a, i64 begin, i64 end, int first) {
  constexpr int kRows = 4;
  float* const q = a.q_out + first * a.m;
  const float* const p = a.p + first * a.n;
  for (int k = 0; k < Ranks; ++k) std::memset(q + k * a.m + begin, 0, (end - begin) * sizeof(float));
  for (i64 row = 0; row < a.n; row += kRows) {
    const int rows = a.n - row < kRows ? int(a.n - row) : kRows;
    float w[kRows][Ranks];
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < Ranks; ++k) w[r][k] = r < rows ? p[k * a.n + row + r] : 0.0f;
    const float* m[kRows];  // rows past the end count as the last one, times 0
    for (int r = 0; r < kRows; ++r) m[r] = a.matrix + (row + (r < rows ? r : rows - 1)) * a.m;
    i64 j = begin;
    for (; j + kLanes <= end; j += kLanes) {
      f32x16 sums[Ranks];
      for (int k = 0; k < Ranks; ++k) sums[k] = load<f32x16>(q + k * a.m + j);
      for (int r = 0; r < kRows; ++r) {
        const f32x16 x = load<f32x16>(m[r] + j);
        for (int k = 0; k < Ranks; ++k) sums[k] += x * w[r][k];
      }
      for (int k = 0; k < Ranks; ++k) store(q + k * a.m + j, sums[k]);
    }
    for (; j < end; ++j)
      for (int r = 0; r < kRows; ++r)
        for (int k = 0; k < Ranks; ++k) q[k * a.m + j] += m[r][j] * w[r][k];
  }
}

inline void back_project(const LowRank& a, i64 begin, i64 end) {
  int first = 0;
  for (; first + kRanks <= a.rank; first += kRanks) back_project_ranks<kRanks>(a, begin, end, first);
  for (; first + 2 <= a.rank; first += 2) back_project_ranks<2>(a, begin, end, first);
  for (; first < a.rank; ++first) back_project_ranks<1>(a, begin, end, first);
}

}  // namespace gradcomm::GC_ISA
