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

// A matrix of PowerSGD and its factors: see lowrank.h.
struct LowRank {
  i64 n, m, rank;
  const float* gradient;  // [n, m]
  float gain;
  float* matrix;   // [n, m]: project reads E and leaves M
  const float* q;  // project: [rank, m]
  float* p;        // [rank, n], written by project
  float* q_out;    // back_project: [rank, m]
};
using LowRankLoop = void (*)(const LowRank&, i64 begin, i64 end);

struct Loops {
  const char* name;
  RecordLoop encode, decode_mean, reduce_encode;
  RecordLoop mask;  // top-k: zero in args.residual what args.payloads (of one rank) sent
  IndexCheck bad_index;
  LowRankLoop project, back_project;  // of rows; of columns
};

const Loops& select();

}  // namespace gradcomm
