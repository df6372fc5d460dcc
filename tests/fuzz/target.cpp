// One decoder under arbitrary bytes: TARGET is decode_mean, reduce_encode or topk_mask. The input
// describes a format, a layout and sizes that csrc/checks.h would let pass; what is left of it is the
// payload. Every buffer is allocated to the byte, so that AddressSanitizer sees the first one too far.
//
// libFuzzer calls LLVMFuzzerTestOneInput; without clang, mutate.cpp does.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/cpu/loops.h"
#include "../../csrc/device/formats.cuh"

namespace gradcomm {
namespace baseline {
extern const Loops loops;
}
#ifdef WIDE  // the instruction set of a second build of the loops, which this processor has
namespace WIDE {
extern const Loops loops;
}
#endif

namespace {

struct Input {
  const uint8_t* at;
  size_t left;

  // A number from low to high, from the next two bytes; low when there are none left.
  i64 number(i64 low, i64 high) {
    u16 value = 0;
    const size_t n = left < 2 ? left : 2;
    if (n != 0) std::memcpy(&value, at, n);
    at += n;
    left -= n;
    return low + value % (high - low + 1);
  }
};

const Loops& loops_of([[maybe_unused]] i64 choice) {
#ifdef WIDE
  if (choice != 0) return WIDE::loops;
#endif
  return baseline::loops;
}

void read_format(Input& in, bool indices, i64* format) {
  format[0] = indices ? in.number(kTopKBlock, kTopKSparse) : in.number(kCast, kTwoBit);
  switch (format[0]) {
    case kCast:
      format[1] = 16 * in.number(1, 40);
      format[2] = in.number(kFloat32, kBFloat16);
      break;
    case kTwoBit:
    case kOneBit: format[1] = 128 * in.number(1, 6); break;
    case kQuantize:
      format[1] = 64 * in.number(1, 12);
      format[2] = i64(2) << in.number(0, 2);
      format[3] = in.number(0, 1);
      format[4] = in.number(0, 1);
      break;
    case kTopKBlock: {
      constexpr i64 kTypes[] = {kFloat32, kFloat16, kInt8};
      format[2] = in.number(1, 300);
      format[1] = kLanes * format[2];
      format[3] = in.number(1, format[2] < 6 ? format[2] : 6);
      format[4] = kTypes[in.number(0, 2)];
      break;
    }
    default: {
      constexpr i64 kTypes[] = {kFloat32, kFloat16, kInt8};
      format[1] = 16 * in.number(1, 20);
      format[2] = in.number(1, 6);
      const i64 elements = format[1] * format[2];
      format[3] = in.number(1, elements < 600 ? elements : 600);
      format[4] = kTypes[in.number(0, 2)];
      format[5] = in.number(0, 1);
    }
  }
}

template <class T>
std::unique_ptr<T[]> filled(i64 n, T value) {
  std::unique_ptr<T[]> buffer(new T[n]);
  for (i64 i = 0; i < n; ++i) buffer[i] = value;
  return buffer;
}

void run(Input in, bool decode, bool mask) {
  const Loops& loops = loops_of(in.number(0, 1));
  Args a{};
  read_format(in, mask, a.format);
  if (format_fault(a.format) != nullptr) std::abort();  // the reader above makes good ones only
  a.block = a.format[1];
  a.record = record_bytes(a.format);
  a.span = record_span(a.format);
  a.ranks = mask ? 1 : in.number(1, 3);
  a.dtype = in.number(kFloat32, kBFloat16);
  a.block_begin = mask ? 0 : in.number(0, 3);
  i64 records = in.number(1, 4);

  std::vector<Segment> segments(in.number(0, 3));
  i64 numel = 0, blocks = 0;
  for (Segment& s : segments) {
    s.offset = numel + in.number(0, 40);
    s.numel = in.number(1, 3 * a.block);
    s.first_block = blocks + in.number(0, 1);
    s.origin = i64(in.number(0, 65535)) << 40;
    numel = s.offset + s.numel;
    blocks = s.first_block + (s.numel + a.block - 1) / a.block;
  }
  if (mask && records * a.span < blocks) records = (blocks + a.span - 1) / a.span;
  // To the byte as well: a vector may hold more than its size.
  const auto layout = filled<Segment>(i64(segments.size()), Segment{});
  for (size_t i = 0; i < segments.size(); ++i) layout[i] = segments[i];
  a.segments = layout.get();
  a.num_segments = i64(segments.size());
  a.key = u64(in.number(0, 65535));
  const bool feedback = in.number(0, 1) != 0;

  a.rank_stride = records * a.record;
  const auto payloads = filled<u8>(a.ranks * a.rank_stride, 0);
  for (i64 i = 0; in.left != 0 && i < a.ranks * a.rank_stride; ++i) payloads[i] = in.at[i % in.left];
  a.payloads = payloads.get();
  // As csrc/cpu/bindings.cpp does, before anything is written.
  if (sends_indices(a.format))
    for (i64 rank = 0; rank < a.ranks; ++rank)
      if (loops.bad_index(a, a.payloads + rank * a.rank_stride, records) >= 0) return;

  const auto out = filled<u8>(numel * wire_size(a.dtype), 0);
  const auto residual = filled<float>((mask ? blocks : records * a.span) * a.block, 0.5f);
  const auto payload = filled<u8>(records * a.record, 0xA5);
  if (decode) a.out = out.get();
  else if (mask || feedback) a.residual = residual.get();
  if (!decode && !mask) a.payload = payload.get();
  const auto scratch = filled<float>(scratch_floats(a), 0.0f);
  (decode ? loops.decode_mean : mask ? loops.mask : loops.reduce_encode)(a, 0, records, scratch.get());
}

}  // namespace
}  // namespace gradcomm

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  enum { decode_mean, reduce_encode, topk_mask };
  gradcomm::run({data, size}, TARGET == decode_mean, TARGET == topk_mask);
  return 0;
}
