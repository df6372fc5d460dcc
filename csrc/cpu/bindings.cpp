// torch.ops.gradcomm.{encode, decode_mean, reduce_encode, topk_mask_, lowrank_*} on CPU, over the
// LibTorch stable ABI. Schemas and fakes are in gradcomm/ops/schemas.py. The arguments are checked by
// ../checks.h, the indices of a payload here, before memory is touched.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../checks.h"
#include "loops.h"

namespace gradcomm {
namespace {

constexpr int64_t kVersion = 5;  // gradcomm/ops/native.py expects the same

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
  Job job = encode_job(source, layout, format, residual, payload, gain, key);
  if (job.args.gain_at != nullptr) job.args.gain = *job.args.gain_at;
  run(job.args, select().encode, job.records);
}

void decode_mean(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                 Tensor out) {
  const Job job = decode_mean_job(payloads, layout, format, block_begin, out);
  check_indices(job.args, job.records);
  run(job.args, select().decode_mean, job.records);
}

void reduce_encode(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                   std::optional<Tensor> residual, Tensor payload, int64_t key) {
  const Job job = reduce_encode_job(payloads, layout, format, block_begin, residual, payload, key);
  check_indices(job.args, job.records);
  run(job.args, select().reduce_encode, job.records);
}

void topk_mask_(const Tensor& payload, const Tensor& layout, Ints format, Tensor buffer) {
  const Job job = topk_mask_job(payload, layout, format, buffer);
  check_indices(job.args, job.records);
  run(job.args, select().mask, job.records);
}

// The factors' rows of a matrix [n, m]; whatever they are of is float32.
void set_factor(const Tensor& t, const char* name, int64_t rank, int64_t columns) {
  check_plain(kCpu, t, name, ScalarType::Float, 2);
  STD_TORCH_CHECK(t.size(0) == rank && t.size(1) == columns, "gradcomm: ", name, " is [", t.size(0),
                  ", ", t.size(1), "]; it must be [", rank, ", ", columns, "]");
}

LowRank low_rank(const Tensor& matrix, const Tensor& p, const Tensor& q) {
  check_plain(kCpu, matrix, "matrix", ScalarType::Float, 2);
  check_plain(kCpu, p, "p", ScalarType::Float, 2);
  LowRank a{};
  a.n = matrix.size(0);
  a.m = matrix.size(1);
  a.rank = p.size(0);
  set_factor(p, "p", a.rank, a.n);
  set_factor(q, "q", a.rank, a.m);
  a.matrix = static_cast<float*>(matrix.mutable_data_ptr());
  a.p = static_cast<float*>(p.mutable_data_ptr());
  return a;
}

constexpr int64_t kMatrixGrain = 1 << 16;  // elements

void lowrank_project_(const Tensor& gradient, Tensor matrix, const Tensor& q, std::optional<Tensor> gain,
                      Tensor p) {
  LowRank a = low_rank(matrix, p, q);
  check_plain(kCpu, gradient, "gradient", ScalarType::Float, 2);
  STD_TORCH_CHECK(gradient.size(0) == a.n && gradient.size(1) == a.m, "gradcomm: gradient is [",
                  gradient.size(0), ", ", gradient.size(1), "], matrix [", a.n, ", ", a.m, "]");
  a.gradient = static_cast<const float*>(gradient.const_data_ptr());
  a.q = static_cast<const float*>(q.const_data_ptr());
  a.gain = 1.0f;
  if (gain) a.gain = *gain_of(kCpu, *gain);
  torch::stable::parallel_for(0, a.n, std::max<int64_t>(1, kMatrixGrain / std::max<int64_t>(1, a.m)),
                              [&](int64_t begin, int64_t end) { select().project(a, begin, end); });
}

void lowrank_back_project_(const Tensor& matrix, const Tensor& p, Tensor q) {
  LowRank a = low_rank(matrix, p, q);
  a.q_out = static_cast<float*>(q.mutable_data_ptr());
  torch::stable::parallel_for(0, a.m, std::max<int64_t>(64, kMatrixGrain / std::max<int64_t>(1, a.n)),
                              [&](int64_t begin, int64_t end) { select().back_project(a, begin, end); });
}

std::string isa() { return select().name; }
int64_t version() { return kVersion; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gradcomm, CPU, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("decode_mean", TORCH_BOX(&decode_mean));
  m.impl("reduce_encode", TORCH_BOX(&reduce_encode));
  m.impl("topk_mask_", TORCH_BOX(&topk_mask_));
  m.impl("lowrank_project_", TORCH_BOX(&lowrank_project_));
  m.impl("lowrank_back_project_", TORCH_BOX(&lowrank_back_project_));
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
