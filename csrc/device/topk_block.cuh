// Block top-k: the k largest magnitudes of every lane of a tile (top-k with error feedback: Aji &
// Heafield 2017; Lin et al. 2018, "Deep Gradient Compression").
//
// A block is a tile of `rows` rows of 16 lanes: element r * 16 + l. Each lane keeps its k largest by
// order_key (NaN is largest), ties going to the smallest row. Record:
//   float32 scale                int8 values only
//   value   values[k][16]        winner s of lane l, the largest first
//   u8|u16  row[k][16]           u8 when rows <= 256
// Every part is a multiple of 4 bytes, so no record needs padding.
#pragma once
#include "topk_values.cuh"

namespace gradcomm::topk_block {

struct Wire {
  i64 rows, k, type;
  i64 values, indices, bytes;  // where the parts begin, and the end
  bool wide;                   // rows need two bytes
};

GC_INLINE Wire wire(const i64* format) {
  Wire w{format[2], format[3], format[4], 0, 0, 0, format[2] > 256};
  w.values = w.type == kInt8 ? 4 : 0;
  w.indices = w.values + w.k * kLanes * wire_size(w.type);
  w.bytes = w.indices + w.k * kLanes * (w.wide ? 2 : 1);
  return w;
}

GC_INLINE const char* fault(const i64* format) {
  const i64 rows = format[2], k = format[3];
  if (rows < 1 || rows > 65535) return "topk_block needs 1 to 65535 rows";
  if (format[1] != kLanes * rows) return "topk_block needs a block of 16 times its rows";
  if (k < 1 || k > rows) return "topk_block needs a k from 1 to its rows";
  return topk::is_value_type(format[4]) ? nullptr : "topk_block values are float32, float16 or int8";
}

}  // namespace gradcomm::topk_block
