// What the tests call by ctypes: an operator of csrc/cuda on the emulator. Every buffer is a copy
// with fences around it, at the alignment that the caller's has.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "simt.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "../../csrc/cuda/cast.cu"
#include "../../csrc/cuda/onebit.cu"
#include "../../csrc/cuda/orthogonalize.cu"
#include "../../csrc/cuda/quantize.cu"
#include "../../csrc/cuda/sparse_launch.h"
#include "../../csrc/cuda/topk_block.cu"
#include "../../csrc/cuda/topk_sparse.cu"
#include "../../csrc/cuda/twobit.cu"
#include "../../csrc/device/formats.cuh"

namespace {

using namespace gradcomm;

class Fenced {
 public:
  Fenced(const void* from, i64 bytes) : from_(from), bytes_(bytes) {
    if (from == nullptr) return;
    const i64 shift = i64(reinterpret_cast<std::uintptr_t>(from) % kAlign);
    size_ = (2 * kFence + shift + bytes + kAlign - 1) / kAlign * kAlign;
    memory_ = static_cast<u8*>(std::aligned_alloc(kAlign, size_));
    std::memset(memory_, kByte, size_);
    data_ = memory_ + kFence + shift;
    std::memcpy(data_, from, bytes);
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(memory_, data_ - memory_);
    ASAN_POISON_MEMORY_REGION(data_ + bytes, memory_ + size_ - data_ - bytes);
#endif
  }
  ~Fenced() { std::free(memory_); }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  template <class T>
  T* at() const {
    return reinterpret_cast<T*>(data_);
  }

  // Back to the caller; whether the fences stand, and (`written` false) the data as well.
  bool close(bool written) {
    if (memory_ == nullptr) return true;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(memory_, size_);
#endif
    bool good = written || std::memcmp(data_, from_, bytes_) == 0;
    for (i64 i = 0; i < size_; ++i)
      if (memory_ + i < data_ || memory_ + i >= data_ + bytes_) good = good && memory_[i] == kByte;
    if (written) std::memcpy(const_cast<void*>(from_), data_, bytes_);
    return good;
  }

 private:
  static constexpr i64 kAlign = 64, kFence = 256;
  static constexpr u8 kByte = 0xff;  // NaN, and indices out of bounds
  const void* from_;
  i64 bytes_, size_ = 0;
  u8 *memory_ = nullptr, *data_ = nullptr;
};

char message[512];

}  // namespace

extern "C" {

// A buffer and its bytes; null for none.
struct Buffer {
  void* data;
  long long bytes;
};

struct Run {
  long long stage, dtype, records, block_begin, ranks, rank_stride, num_segments;
  unsigned long long key;
  long long format[6];
  long long warps, grid, order, seed;  // warps 0: as on a GPU
  Buffer layout, bucket, gain, residual, payload, payloads;
};

// Whether there are kernels for this format.
int simt_has(const long long* format) { return has_kernels_for(format); }

// One launch as it is told, over the caller's own memory: null, or what went wrong.
const char* simt_launch(Kernel kernel, unsigned grid, unsigned threads, unsigned shared,
                        const Task* task) {
  const std::string fault =
      simt::run({grid, threads, shared, simt::Order::kForwards, 0}, [&] { kernel(*task); });
  std::snprintf(message, sizeof(message), "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}

// In place; null, or what went wrong.
const char* simt_orthogonalize(float* data, i64 count, i64 rows, i64 columns, unsigned grid,
                               unsigned warps, int order, u64 seed) {
  Fenced matrices(data, count * rows * columns * i64(sizeof(float)));
  const Matrices m{matrices.at<float>(), count, rows, columns};
  std::string fault =
      simt::run({grid, warps * kWarp, kOrthogonalizeBytes, simt::Order(order), seed},
                [&] { orthogonalize_kernel(m); });
  if (!matrices.close(true) && fault.empty()) fault = "a kernel wrote outside its matrices";
  std::snprintf(message, sizeof(message), "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}

// Null, or what went wrong.
const char* simt_run(const Run* run) {
  Fenced bucket(run->bucket.data, run->bucket.bytes), gain(run->gain.data, run->gain.bytes),
      residual(run->residual.data, run->residual.bytes), payload(run->payload.data, run->payload.bytes),
      payloads(run->payloads.data, run->payloads.bytes);
  Args a{};
  std::memcpy(a.format, run->format, sizeof(a.format));
  a.block = a.format[1];
  a.record = record_bytes(a.format);
  a.segments = static_cast<const Segment*>(run->layout.data);
  a.num_segments = run->num_segments;
  a.block_begin = run->block_begin;
  a.dtype = run->dtype;
  a.source = a.out = bucket.at<void>();
  a.gain_at = gain.at<float>();
  a.residual = residual.at<float>();
  a.payload = payload.at<u8>();
  a.key = run->key;
  a.payloads = payloads.at<u8>();
  a.ranks = run->ranks;
  a.rank_stride = run->rank_stride;
  const auto stage = Stage(run->stage);
  a.span = record_span(a.format);
  // Scratch begins as what the fences are made of: a word that is read before it is written shows.
  std::vector<u8> fresh(words_of_scratch(a, stage, run->records) * sizeof(u32), 0xff);
  Fenced scratch(fresh.empty() ? nullptr : fresh.data(), i64(fresh.size()));
  a.scratch = scratch.at<u32>();
  std::string fault;
  const auto enqueue = [&](Launch launch, const Task& task) {
    if (!fault.empty()) return;
    fault = simt::run(
        {launch.grid, launch.threads, launch.shared_bytes, simt::Order(run->order), u64(run->seed)},
        [&] { launch.kernel(task); });
  };
  for_launches(a, stage, run->records, int(run->warps), run->grid, enqueue);
  bool good = bucket.close(stage == Stage::kDecodeMean);
  good = scratch.close(true) && good;
  good = gain.close(false) && good;
  good = residual.close(true) && good;
  good = payload.close(true) && good;
  good = payloads.close(false) && good;
  if (fault.empty() && !good) fault = "a kernel wrote outside its buffers, or what it may only read";
  std::snprintf(message, sizeof(message), "%s", fault.c_str());
  return fault.empty() ? nullptr : message;
}
}
