// torch.ops.gradcomm.{encode, decode_mean, reduce_encode, topk_mask_, orthogonalize_} on CUDA, over
// the LibTorch stable ABI: one or a few launches on the caller's current stream, and nothing that waits
// for the device. So indices of a payload are checked in the kernels (topk_block.cuh and
// sparse_decode.cuh say what becomes of a bad one). A format without kernels is left to the reference.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>

#include "../checks.h"
#include "run.h"

namespace gradcomm {
namespace {

constexpr int64_t kVersion = 5;  // gradcomm/ops/native.py expects the same

// Calls an operator of gradcomm/ops/schemas.py that runs on the reference.
template <class... Arguments>
void call(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
}

bool has_kernels_for(const Ints& format) {
  const Args a = make_args(format);
  return has_kernels(a.format);
}

// The device of a tensor, made current, and the caller's stream there.
struct Here {
  explicit Here(const Tensor& on) : device(on.get_device_index()), guard(device) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  }
  int32_t device;
  torch::stable::accelerator::DeviceGuard guard;
  void* stream = nullptr;
};

void check_launch(const char* error) {
  STD_TORCH_CHECK(error == nullptr, "gradcomm: a CUDA kernel could not be launched: ", error);
}

void enqueue(Job job, Stage stage, const Tensor& on) {
  const auto words = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 4 == 0; };
  STD_TORCH_CHECK(on.is_cuda(), "gradcomm: the bucket and the payloads must be on one CUDA device");
  STD_TORCH_CHECK(words(job.args.payload) && words(job.args.payloads),
                  "gradcomm: on CUDA a payload must begin at a multiple of 4 bytes");
  const Here here(on);
  // Given back on return, to be had again by what this stream runs later: after the launches.
  std::optional<Tensor> scratch;
  if (const int64_t bytes = scratch_bytes(job.args, stage, job.records); bytes > 0) {
    scratch = torch::stable::new_empty(on, {bytes}, ScalarType::Byte);
    job.args.scratch = static_cast<u32*>(scratch->mutable_data_ptr());
  }
  check_launch(run(job.args, stage, job.records, here.device, here.stream));
}

void encode(const Tensor& source, const Tensor& layout, Ints format, std::optional<Tensor> residual,
            Tensor payload, std::optional<Tensor> gain, int64_t key) {
  if (!has_kernels_for(format))
    return call("gradcomm::reference_encode", source, layout, format, residual, payload, gain, key);
  enqueue(encode_job(source, layout, format, residual, payload, gain, key), Stage::kEncode, source);
}

void decode_mean(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                 Tensor out) {
  if (!has_kernels_for(format))
    return call("gradcomm::reference_decode_mean", payloads, layout, format, block_begin, out);
  enqueue(decode_mean_job(payloads, layout, format, block_begin, out), Stage::kDecodeMean, payloads);
}

void reduce_encode(const Tensor& payloads, const Tensor& layout, Ints format, int64_t block_begin,
                   std::optional<Tensor> residual, Tensor payload, int64_t key) {
  if (!has_kernels_for(format))
    return call("gradcomm::reference_reduce_encode", payloads, layout, format, block_begin, residual,
                payload, key);
  enqueue(reduce_encode_job(payloads, layout, format, block_begin, residual, payload, key),
          Stage::kReduceEncode, payloads);
}

void topk_mask_(const Tensor& payload, const Tensor& layout, Ints format, Tensor buffer) {
  if (!has_kernels_for(format))
    return call("gradcomm::reference_topk_mask_", payload, layout, format, buffer);
  enqueue(topk_mask_job(payload, layout, format, buffer), Stage::kMask, payload);
}

void orthogonalize_(Tensor rows) {
  check_plain(Place::of(rows), rows, "rows", ScalarType::Float, 3);
  const Matrices m{static_cast<float*>(rows.mutable_data_ptr()), rows.size(0), rows.size(1),
                   rows.size(2)};
  if (m.rows > kRowsMost) return call("gradcomm::reference_orthogonalize_", rows);
  const Here here(rows);
  check_launch(run_orthogonalize(m, here.device, here.stream));
}

bool has(Ints format) { return has_kernels_for(format); }
int64_t version() { return kVersion; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gradcomm, CUDA, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("decode_mean", TORCH_BOX(&decode_mean));
  m.impl("reduce_encode", TORCH_BOX(&reduce_encode));
  m.impl("topk_mask_", TORCH_BOX(&topk_mask_));
  m.impl("orthogonalize_", TORCH_BOX(&orthogonalize_));
}

STABLE_TORCH_LIBRARY_FRAGMENT(gradcomm, m) {
  m.def("cuda_has_kernels(int[] format) -> bool");
  m.def("cuda_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(gradcomm, CompositeExplicitAutograd, m) {
  m.impl("cuda_has_kernels", TORCH_BOX(&has));
  m.impl("cuda_version", TORCH_BOX(&version));
}

}  // namespace gradcomm
