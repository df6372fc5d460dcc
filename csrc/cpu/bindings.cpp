// torch.ops.gradcomm.{encode, decode_mean, reduce_encode, topk_mask_} on CPU, over the LibTorch
// stable ABI. Schemas and fakes are in gradcomm/ops/schemas.py. Everything is checked here, before
// memory is touched; the loops trust it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../device/formats.cuh"
#include "loops.h"

namespace gradcomm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

constexpr int64_t kVersion = 3;  // gradcomm/ops/native.py expects the same

constexpr int64_t kFar = int64_t(1) << 40;  // no block or segment lies or reaches beyond: no overflow

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_plain(const Tensor& t, const char* name, ScalarType type, int64_t dim) {
  STD_TORCH_CHECK(t.is_cpu(), "gradcomm: ", name, " must be a CPU tensor");
  STD_TORCH_CHECK(t.scalar_type() == type, "gradcomm: ", name, " has the wrong dtype");
  STD_TORCH_CHECK(t.dim() == dim, "gradcomm: ", name, " must have ", dim, " dimensions, not ", t.dim());
  STD_TORCH_CHECK(t.is_contiguous(), "gradcomm: ", name, " must be contiguous");
}

int64_t check_bucket(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), "gradcomm: ", name, " must be a CPU tensor");
  STD_TORCH_CHECK(t.dim() == 1 && t.is_contiguous(), "gradcomm: ", name,
                  " must be contiguous and one-dimensional");
  switch (t.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    default: STD_TORCH_CHECK(false, "gradcomm: ", name, " must be float32, float16 or bfloat16");
  }
}

Args make_args(const Ints& format) {
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
int64_t set_layout(Args& a, const Tensor& layout, int64_t bucket_numel) {
  check_plain(layout, "layout", ScalarType::Long, 2);
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

void set_begin(Args& a, int64_t block_begin) {
  STD_TORCH_CHECK(block_begin >= 0 && block_begin <= kFar, "gradcomm: block_begin is ", block_begin);
  a.block_begin = block_begin;
}

// The records of a chunk of this many bytes.
int64_t set_record(Args& a, int64_t chunk_bytes) {
  a.record = record_bytes(a.format);
  a.span = record_span(a.format);
  STD_TORCH_CHECK(chunk_bytes % a.record == 0, "gradcomm: a chunk of ", chunk_bytes,
                  " bytes is no whole number of records of ", a.record, " bytes");
  return chunk_bytes / a.record;
}

void set_residual(Args& a, const std::optional<Tensor>& residual, int64_t blocks,
                  const char* name = "residual") {
  if (!residual) return;
  check_plain(*residual, name, ScalarType::Float, 1);
  STD_TORCH_CHECK(residual->numel() >= blocks * a.block, "gradcomm: the ", name, " has ",
                  residual->numel(), " elements; ", blocks, " blocks of ", a.block, " need ",
                  blocks * a.block);
  a.residual = static_cast<float*>(residual->mutable_data_ptr());
}

void set_payloads(Args& a, const Tensor& payloads) {
  check_plain(payloads, "payloads", ScalarType::Byte, 3);
  STD_TORCH_CHECK(payloads.size(0) >= 1, "gradcomm: payloads must come from one rank or more");
  a.ranks = payloads.size(0);
  a.rank_stride = payloads.size(1) * payloads.size(2);
  a.payloads = static_cast<const u8*>(payloads.const_data_ptr());
}

// Nothing has been written when this throws.
void check_indices(const Args& a, int64_t records) {
  if (!sends_indices(a.format)) return;
  for (int64_t rank = 0; rank < a.ranks; ++rank) {
    const int64_t bad = select().bad_index(a, a.payloads + rank * a.rank_stride, records);
    STD_TORCH_CHECK(bad < 0, "gradcomm: the payload of rank ", rank, " holds the index ", bad,
                    "; indices must be below ", index_bound(a.format));
  }
}

void run(const Args& a, RecordLoop loop, int64_t records) {
  constexpr int64_t kGrain = 1 << 15;  // elements; below this a thread costs more than it saves
  const int64_t floats = scratch_floats(a);
  torch::stable::parallel_for(0, records, std::max<int64_t>(1, kGrain / (a.block * a.span)),
                              [&](int64_t begin, int64_t end) {
                                thread_local std::vector<float> scratch;
                                // A cache line to spare: a row that straddles two lines costs double.
                                constexpr int64_t kLine = 64;
                                if (int64_t(scratch.size()) < floats + kLine)
                                  scratch.resize(floats + kLine);
                                const auto at = reinterpret_cast<uintptr_t>(scratch.data());
                                loop(a, begin, end, scratch.data() + (-at % kLine) / sizeof(float));
                              });
}

void encode(const Tensor& source, const Tensor& layout, Ints format, std::optional<Tensor> residual,
            Tensor payload, std::optional<Tensor> gain, int64_t key) {
  Args a = make_args(format);
  a.dtype = check_bucket(source, "source");
  a.source = source.const_data_ptr();
  const int64_t needed = set_layout(a, layout, source.numel());
  check_plain(payload, "payload", ScalarType::Byte, 2);
  const int64_t records = payload.size(0) * set_record(a, payload.size(1));
  const int64_t blocks = records * a.span;
  STD_TORCH_CHECK(blocks >= needed, "gradcomm: the payload holds ", blocks, " blocks; the layout needs ",
                  needed);
  set_residual(a, residual, needed);
  a.payload = static_cast<u8*>(payload.mutable_data_ptr());
  if (gain) {
    STD_TORCH_CHECK(gain->is_cpu() && gain->scalar_type() == ScalarType::Float && gain->numel() == 1,
                    "gradcomm: gain must be one float32 on the CPU");
    a.gain = *static_cast<const float*>(gain->const_data_ptr());
  }
  a.key = key;
  run(a, select().encode, records);
}

void decode_mean(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                 Tensor out) {
  Args a = make_args(format);
  a.dtype = check_bucket(out, "out");
  a.out = out.mutable_data_ptr();
  set_layout(a, layout, out.numel());
  set_payloads(a, payloads);
  set_begin(a, block_begin);
  const int64_t records = payloads.size(1) * set_record(a, payloads.size(2));
  check_indices(a, records);
  run(a, select().decode_mean, records);
}

void reduce_encode(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                   std::optional<Tensor> residual, Tensor payload, int64_t key) {
  Args a = make_args(format);
  set_layout(a, layout, -1);
  set_payloads(a, payloads);
  check_plain(payload, "payload", ScalarType::Byte, 1);
  set_begin(a, block_begin);
  const int64_t records = payloads.size(1) * set_record(a, payloads.size(2));
  STD_TORCH_CHECK(payload.numel() == payloads.size(1) * payloads.size(2), "gradcomm: the payload has ",
                  payload.numel(), " bytes; the chunk needs ", payloads.size(1) * payloads.size(2));
  set_residual(a, residual, records * a.span);
  a.payload = static_cast<u8*>(payload.mutable_data_ptr());
  a.key = key;
  check_indices(a, records);
  run(a, select().reduce_encode, records);
}

void topk_mask_(const Tensor& payload, const Tensor& layout, Ints format, Tensor buffer) {
  Args a = make_args(format);
  STD_TORCH_CHECK(sends_indices(a.format), "gradcomm: topk_mask_ needs a top-k format, not family ",
                  a.format[0]);
  const int64_t needed = set_layout(a, layout, -1);
  check_plain(payload, "payload", ScalarType::Byte, 2);
  const int64_t records = payload.size(0) * set_record(a, payload.size(1));
  STD_TORCH_CHECK(records * a.span >= needed, "gradcomm: the payload holds ", records * a.span,
                  " blocks; the layout needs ", needed);
  a.payloads = static_cast<const u8*>(payload.const_data_ptr());
  a.ranks = 1;
  set_residual(a, buffer, needed, "buffer");
  check_indices(a, records);
  run(a, select().mask, records);
}

std::string isa() { return select().name; }
int64_t version() { return kVersion; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gradcomm, CPU, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("decode_mean", TORCH_BOX(&decode_mean));
  m.impl("reduce_encode", TORCH_BOX(&reduce_encode));
  m.impl("topk_mask_", TORCH_BOX(&topk_mask_));
}

STABLE_TORCH_LIBRARY_FRAGMENT(gradcomm, m) {
  m.def("cpu_isa() -> str");
  m.def("cpu_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(gradcomm, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&isa));
  m.impl("cpu_version", TORCH_BOX(&version));
}

}  // namespace gradcomm
