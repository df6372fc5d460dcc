// What the bindings call: operators as launches on a stream. Free of torch and of CUDA's headers.
#pragma once
#include "../args.h"
#include "matrices.cuh"

namespace gradcomm {

enum class Stage { kEncode, kDecodeMean, kReduceEncode, kMask };

// Whether this format has kernels here; the others are left to the reference.
bool has_kernels(const i64* format);

// Bytes of device memory that an operator's launches need as Args::scratch, 16-byte aligned; what it
// holds does not matter.
i64 scratch_bytes(const Args& args, Stage stage, i64 records);

// Enqueues an operator and returns at once: null, or CUDA's error. The pointers of `args` but for
// the layout's are of the device; payloads begin at a multiple of 4 bytes. The layout is copied at
// once.
const char* run(const Args& args, Stage stage, i64 records, int device, void* stream);

// Enqueues gradcomm_orthogonalize, for up to kRowsMost rows.
const char* run_orthogonalize(const Matrices& matrices, int device, void* stream);

}  // namespace gradcomm
