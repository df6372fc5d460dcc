// The block loops of one instruction set. CMakeLists.txt compiles this file once for each, with its
// flags and its name in GC_ISA. Nothing of the standard library's templates may be instantiated here:
// the linker keeps one copy of those, and it might be the one that this processor cannot run.
#include "loops.h"

#include "cast.h"
#include "lowrank.h"
#include "onebit.h"
#include "quantize.h"
#include "topk_block.h"
#include "topk_sparse.h"
#include "twobit.h"

namespace gradcomm::GC_ISA {
namespace {

// Calls loop.operator()<Format>() with the struct of the format in `a`.
template <class Loop>
void with_format(const Args& a, Loop&& loop) {
  switch (a.format[0]) {
    case kCast: return with_cast(a, loop);
    case kOneBit: return loop.template operator()<OneBit>();
    case kQuantize: return with_quantize(a, loop);
    case kTopKBlock: return loop.template operator()<TopKBlock>();
    case kTwoBit: return loop.template operator()<TwoBit>();
    default: return;
  }
}

#define GC_FOR_FORMAT(loop)                                                                 \
  void loop(const Args& a, i64 begin, i64 end, float* scratch) {                            \
    if (a.format[0] == kTopKSparse) return loop##_chunks(a, begin, end, scratch);           \
    with_format(a, [&]<class Format>() { loop##_blocks<Format>(a, begin, end, scratch); }); \
  }

GC_FOR_FORMAT(encode)
GC_FOR_FORMAT(decode_mean)
GC_FOR_FORMAT(reduce_encode)

void mask(const Args& a, i64 begin, i64 end, float*) {
  if (a.format[0] == kTopKBlock) mask_blocks(a, begin, end);
  else mask_chunks(a, begin, end);
}

i64 bad_index(const Args& a, const u8* payload, i64 records) {
  return a.format[0] == kTopKBlock ? bad_row(a, payload, records)
                                   : bad_index_in_chunks(a, payload, records);
}

}  // namespace

#define GC_STRING(x) #x
#define GC_NAME(x) GC_STRING(x)
extern const Loops loops;
const Loops loops{GC_NAME(GC_ISA), encode,  decode_mean, reduce_encode, mask,
                  bad_index,       project, back_project};

}  // namespace gradcomm::GC_ISA
