// What the bindings call: loops over records, once for each instruction set. `select()` picks
// the widest that this processor has.
#pragma once
#include "../args.h"

namespace gradcomm {

// Records [begin, end) count from the payload's first; scratch holds scratch_floats(args).
using RecordLoop = void (*)(const Args&, i64 begin, i64 end, float* scratch);

i64 scratch_floats(const Args& a);

// For the sparse format: how many candidates a selection keeps, and the scratch of one encoding.
i64 sparse_candidates(const i64* format);
i64 sparse_scratch_floats(const i64* format);

// Formats that send indices are checked by this before anything is written: the largest index in the
// first `records` records of one rank's payload, if it is out of bounds, else -1.
using IndexCheck = i64 (*)(const Args&, const u8* payload, i64 records);

struct Loops {
  const char* name;
  RecordLoop encode, decode_mean, reduce_encode;
  RecordLoop mask;  // top-k: zero in args.residual what args.payloads (of one rank) sent
  IndexCheck bad_index;
};

const Loops& select();

}  // namespace gradcomm
