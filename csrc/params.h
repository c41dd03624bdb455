// The native ABI: one plain struct per operation. Pointers are raw, strides count elements, the caller
// allocates. "Compute type" is double for float64 logits and float for every other dtype.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace rlk {

// Logits [outer, inner, vocab] with any strides; rows are numbered outer * inner_size + inner.
struct LogitsView {
  const void* data;
  DType dtype;
  int64_t outer, inner, vocab;
  int64_t stride_outer, stride_inner, stride_vocab;

  int64_t rows() const { return outer * inner; }
  int64_t row_offset(int64_t row) const { return (row / inner) * stride_outer + (row % inner) * stride_inner; }
};

// What turns a logit x into z; see row_math.h. Values in the compute type.
struct RowScaling {
  const void* temperature;     // [1] or [rows]
  int64_t temperature_stride;  // 0 or 1
  const void* softcap;         // [1], or null for none
  const void* logit_scale;     // [1]
};

struct TokenStatsForwardParams {
  LogitsView logits;
  const int64_t* targets;  // [rows]
  int64_t ignore_index;
  RowScaling scaling;
  // [rows] in the compute type; null where not asked for
  void* logp;
  void* entropy;
  void* lse;
  void* log_sum_sq_probs;
  void* mean_logits;
  uint8_t* is_top1;
  void* row_max;      // m, of the untempered logits (of tanh under softcap): saved for backward
  void* log_sum_exp;  // log s: saved for backward
  int threads;
};

struct TokenStatsBackwardParams {
  LogitsView logits;
  const int64_t* targets;
  int64_t ignore_index;
  RowScaling scaling;
  // upstream gradients, [rows] in the compute type; null where none arrived
  const void* dlogp;
  const void* dentropy;
  const void* dlse;
  // saved by forward; entropy may be null when dentropy is
  const void* row_max;
  const void* log_sum_exp;
  const void* entropy;
  void* dlogits;  // [rows, vocab] contiguous, logits' dtype; every element is written
  int threads;
};

// Token ids of responses; rows of one group are compared with each other.
struct PrefixCountsParams {
  const int64_t* token_ids;  // [rows, width] contiguous
  int64_t rows, width;
  const int64_t* lengths;       // [rows], 0 <= length <= width
  const int64_t* row_order;     // [rows]: rows sorted by group
  const int64_t* group_starts;  // [groups + 1] into row_order
  int64_t groups;
  int32_t* counts;  // [rows, width] contiguous; every element is written, 1 at padding
  int threads;
};

}  // namespace rlk
