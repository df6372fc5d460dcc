// The arguments of torch.ops.gradcomm.* as an Args, over the LibTorch stable ABI, the same for
// every device. Everything is checked here, before memory is touched; what runs afterwards trusts
// it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "args.h"
#include "device/formats.cuh"

namespace gradcomm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// Which device this library's tensors must be on; the layout is on the CPU always.
struct Place {
  bool cuda;
  int64_t index;  // of a CUDA device: that of the first tensor

  static Place of(const Tensor& t) { return {t.is_cuda(), t.is_cuda() ? t.get_device_index() : 0}; }
  bool has(const Tensor& t) const {
    return cuda ? t.is_cuda() && t.get_device_index() == index : t.is_cpu();
  }
};
constexpr Place kCpu{false, 0};

constexpr int64_t kFar = int64_t(1) << 40;  // no block or segment lies or reaches beyond: no overflow

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void check_place(const Place& place, const Tensor& t, const char* name) {
  STD_TORCH_CHECK(place.cuda || place.has(t), "gradcomm: ", name, " must be a CPU tensor");
  STD_TORCH_CHECK(place.has(t), "gradcomm: ", name, " must be a tensor on CUDA device ", place.index);
}

inline void check_plain(const Place& place, const Tensor& t, const char* name, ScalarType type,
                        int64_t dim) {
  check_place(place, t, name);
  STD_TORCH_CHECK(t.scalar_type() == type, "gradcomm: ", name, " has the wrong dtype");
  STD_TORCH_CHECK(t.dim() == dim, "gradcomm: ", name, " must have ", dim, " dimensions, not ", t.dim());
  STD_TORCH_CHECK(t.is_contiguous(), "gradcomm: ", name, " must be contiguous");
}

inline int64_t check_bucket(const Place& place, const Tensor& t, const char* name) {
  check_place(place, t, name);
  STD_TORCH_CHECK(t.dim() == 1 && t.is_contiguous(), "gradcomm: ", name,
                  " must be contiguous and one-dimensional");
  switch (t.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    default: STD_TORCH_CHECK(false, "gradcomm: ", name, " must be float32, float16 or bfloat16");
  }
}

inline Args make_args(const Ints& format) {
  STD_TORCH_CHECK(format.size() == kFormatInts, "gradcomm: a format has ", kFormatInts,
                  " integers, not ", format.size());
  Args a{};
  for (int i = 0; i < kFormatInts; ++i) a.format[i] = format[i];
  const char* fault = format_fault(a.format);
  STD_TORCH_CHECK(fault == nullptr, "gradcomm: bad format: ", fault);
  a.block = a.format[1];
  return a;
}

// The last block that a segment of the layout needs, plus one.
inline int64_t set_layout(Args& a, const Tensor& layout, int64_t bucket_numel) {
  check_plain(kCpu, layout, "layout", ScalarType::Long, 2);
  STD_TORCH_CHECK(layout.size(1) == 4, "gradcomm: layout must have 4 columns, not ", layout.size(1));
  static_assert(sizeof(Segment) == 4 * sizeof(int64_t));
  a.segments = static_cast<const Segment*>(layout.const_data_ptr());
  a.num_segments = layout.size(0);
  int64_t next = 0;
  for (int64_t i = 0; i < a.num_segments; ++i) {
    const Segment& s = a.segments[i];
    STD_TORCH_CHECK(
        s.numel >= 1 && s.numel <= kFar && s.offset >= 0 &&
            (bucket_numel < 0 || (s.numel <= bucket_numel && s.offset <= bucket_numel - s.numel)),
        "gradcomm: segment ", i, " of the layout (offset ", s.offset, ", ", s.numel,
        " elements) leaves the bucket of ", bucket_numel, " elements");
    STD_TORCH_CHECK(s.first_block >= next && s.first_block <= kFar, "gradcomm: segment ", i,
                    " of the layout begins at block ", s.first_block,
                    ", inside the segment before it or out of reach");
    next = s.first_block + ceil_div(s.numel, a.block);
  }
  return next;
}

inline void set_begin(Args& a, int64_t block_begin) {
  STD_TORCH_CHECK(block_begin >= 0 && block_begin <= kFar, "gradcomm: block_begin is ", block_begin);
  a.block_begin = block_begin;
}

// The records of a chunk of this many bytes.
inline int64_t set_record(Args& a, int64_t chunk_bytes) {
  a.record = record_bytes(a.format);
  a.span = record_span(a.format);
  STD_TORCH_CHECK(chunk_bytes % a.record == 0, "gradcomm: a chunk of ", chunk_bytes,
                  " bytes is no whole number of records of ", a.record, " bytes");
  return chunk_bytes / a.record;
}

inline void set_residual(Args& a, const Place& place, const std::optional<Tensor>& residual,
                         int64_t blocks, const char* name = "residual") {
  if (!residual) return;
  check_plain(place, *residual, name, ScalarType::Float, 1);
  STD_TORCH_CHECK(residual->numel() >= blocks * a.block, "gradcomm: the ", name, " has ",
                  residual->numel(), " elements; ", blocks, " blocks of ", a.block, " need ",
                  blocks * a.block);
  a.residual = static_cast<float*>(residual->mutable_data_ptr());
}

inline const float* gain_of(const Place& place, const Tensor& gain) {
  check_place(place, gain, "gain");
  STD_TORCH_CHECK(gain.scalar_type() == ScalarType::Float && gain.numel() == 1,
                  "gradcomm: gain must be one float32");
  return static_cast<const float*>(gain.const_data_ptr());
}

inline void set_payloads(Args& a, const Place& place, const Tensor& payloads) {
  check_plain(place, payloads, "payloads", ScalarType::Byte, 3);
  STD_TORCH_CHECK(payloads.size(0) >= 1, "gradcomm: payloads must come from one rank or more");
  a.ranks = payloads.size(0);
  a.rank_stride = payloads.size(1) * payloads.size(2);
  a.payloads = static_cast<const u8*>(payloads.const_data_ptr());
}

// An operator's arguments, checked, and the records that it works on.
struct Job {
  Args args;
  int64_t records;
};

inline Job encode_job(const Tensor& source, const Tensor& layout, const Ints& format,
                      const std::optional<Tensor>& residual, const Tensor& payload,
                      const std::optional<Tensor>& gain, int64_t key) {
  const Place place = Place::of(source);
  Args a = make_args(format);
  a.dtype = check_bucket(place, source, "source");
  a.source = source.const_data_ptr();
  const int64_t needed = set_layout(a, layout, source.numel());
  check_plain(place, payload, "payload", ScalarType::Byte, 2);
  const int64_t records = payload.size(0) * set_record(a, payload.size(1));
  const int64_t blocks = records * a.span;
  STD_TORCH_CHECK(blocks >= needed, "gradcomm: the payload holds ", blocks, " blocks; the layout needs ",
                  needed);
  set_residual(a, place, residual, needed);
  a.payload = static_cast<u8*>(payload.mutable_data_ptr());
  if (gain) a.gain_at = gain_of(place, *gain);
  a.key = key;
  return {a, records};
}

inline Job decode_mean_job(const Tensor& payloads, const Tensor& layout, const Ints& format,
                           int64_t block_begin, const Tensor& out) {
  const Place place = Place::of(payloads);
  Args a = make_args(format);
  a.dtype = check_bucket(place, out, "out");
  a.out = out.mutable_data_ptr();
  set_layout(a, layout, out.numel());
  set_payloads(a, place, payloads);
  set_begin(a, block_begin);
  const int64_t records = payloads.size(1) * set_record(a, payloads.size(2));
  return {a, records};
}

inline Job reduce_encode_job(const Tensor& payloads, const Tensor& layout, const Ints& format,
                             int64_t block_begin, const std::optional<Tensor>& residual,
                             const Tensor& payload, int64_t key) {
  const Place place = Place::of(payloads);
  Args a = make_args(format);
  set_layout(a, layout, -1);
  set_payloads(a, place, payloads);
  check_plain(place, payload, "payload", ScalarType::Byte, 1);
  set_begin(a, block_begin);
  const int64_t records = payloads.size(1) * set_record(a, payloads.size(2));
  STD_TORCH_CHECK(payload.numel() == payloads.size(1) * payloads.size(2), "gradcomm: the payload has ",
                  payload.numel(), " bytes; the chunk needs ", payloads.size(1) * payloads.size(2));
  set_residual(a, place, residual, records * a.span);
  a.payload = static_cast<u8*>(payload.mutable_data_ptr());
  a.key = key;
  return {a, records};
}

inline Job topk_mask_job(const Tensor& payload, const Tensor& layout, const Ints& format,
                         const Tensor& buffer) {
  const Place place = Place::of(payload);
  Args a = make_args(format);
  STD_TORCH_CHECK(sends_indices(a.format), "gradcomm: topk_mask_ needs a top-k format, not family ",
                  a.format[0]);
  const int64_t needed = set_layout(a, layout, -1);
  check_plain(place, payload, "payload", ScalarType::Byte, 2);
  const int64_t records = payload.size(0) * set_record(a, payload.size(1));
  STD_TORCH_CHECK(records * a.span >= needed, "gradcomm: the payload holds ", records * a.span,
                  " blocks; the layout needs ", needed);
  a.payloads = static_cast<const u8*>(payload.const_data_ptr());
  a.ranks = 1;
  set_residual(a, place, buffer, needed, "buffer");
  return {a, records};
}

}  // namespace gradcomm
