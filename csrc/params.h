// The native ABI: one plain struct per operation. Pointers are raw, strides count elements, the caller
// allocates. "Compute type" is double for float64 logits and float for every other dtype.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "objective.h"

namespace rlk {

// Logits [outer, inner, vocab] with any strides, stored as rows numbered outer * inner_size + inner. The rows of a
// sweep are these in their order, or those that an index names.
struct LogitsView {
  const void* data;
  DType dtype;
  int64_t outer, inner, vocab;
  int64_t stride_outer, stride_inner, stride_vocab;
  const int64_t* index;  // [count] stored rows, any of them any number of times; or null
  int64_t count;

  HOST_DEVICE int64_t rows() const { return count; }
  HOST_DEVICE bool has_row(int64_t row) const {
    return index == nullptr || (index[row] >= 0 && index[row] < outer * inner);
  }
  HOST_DEVICE int64_t row_offset(int64_t row) const {
    if (index) row = has_row(row) ? index[row] : 0;  // what is not there is never an address
    return (row / inner) * stride_outer + (row % inner) * stride_inner;
  }
};

// What turns a logit x into z; see row_math.h. Values in the compute type.
struct RowScaling {
  const void* temperature;     // [1] or [rows]
  int64_t temperature_stride;  // 0 or 1
  const void* softcap;         // [1], or null for none
  const void* logit_scale;     // [1]
};

// One value a row, in the compute type; null where not asked for.
struct RowStatsOut {
  void* logp;
  void* entropy;
  void* lse;
  void* log_sum_sq_probs;
  void* mean_logits;
  uint8_t* is_top1;
  void* row_max;      // m, of the untempered logits (of tanh under softcap): saved for backward
  void* log_sum_exp;  // log s: saved for backward

  HOST_DEVICE bool needs_all_sums() const { return log_sum_sq_probs || mean_logits || is_top1; }
};

// Statistics of columns [vocab_start, vocab_start + logits.vocab) of rows of `vocab` columns: all of them at once, or
// tiles from left to right.
struct TokenStatsForwardParams {
  LogitsView logits;
  int64_t vocab, vocab_start;
  const int64_t* targets;  // [rows]
  int64_t ignore_index;
  RowScaling scaling;
  RowStatsOut out;  // written with the last column; before that it only says what will be asked for
  void* states;     // [rows] RowState<double>, started by the first tile; may be null where one tile is all
  int threads;
};

// Gradient of columns [vocab_start, vocab_start + logits.vocab): all of them, or a tile.
struct TokenStatsBackwardParams {
  LogitsView logits;
  int64_t vocab, vocab_start;
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
  void* dlogits;  // [rows, logits.vocab] contiguous, logits' dtype; every element is written; may be the logits
  void* dtarget;  // [rows] in the compute type: takes the target's gradient, which is 0 in dlogits then; or null
  int threads;
};

enum class Reduction : int { kTokenMean, kSeqMeanTokenMean, kSeqMeanTokenSum, kSeqMeanTokenSumNorm, kTokenSum };

// Order of PolicyObjectiveParams.metrics: a count, sums over the trained tokens, then extremes over them and, for the
// clip fractions, over sequences.
enum ObjectiveMetric : int {
  kCount,
  kKlK1,
  kKlK3,
  kRatio,
  kRatioSpread,  // squares of ratio - 1
  kClipLow,
  kClipHigh,
  kWeight,
  kPolicyWeight,
  kRefKl,
  kEntropy,
  kFirstMinimum,  // of the ratio, the low and the high clip fraction
  kFirstMaximum = kFirstMinimum + 3,
  kObjectiveMetrics = kFirstMaximum + 3
};

// Everything between per-token statistics and the loss. Floats are of `dtype`, float64 or float32.
struct PolicyObjectiveParams {
  ObjectiveOptions options;
  DType dtype;
  int64_t tokens, sequences;
  int64_t width;              // tokens of every sequence, where cu_seqlens is null
  const int64_t* cu_seqlens;  // [sequences + 1]
  const uint8_t* mask;        // [tokens], nonzero = trained
  const void* logp;           // [tokens]; so are the next ones, which may be null
  const void* entropy;
  const void* old_logp;  // null: on-policy
  const void* ref_logp;
  const void* weight;
  // [tokens] or [sequences]; the last two may be null
  const void* advantages;
  const void* policy_weight;
  const void* success_rate;
  bool advantages_per_token, policy_weight_per_token, success_rate_per_token;
  Reduction reduction, entropy_reduction;
  const double *normalizer, *entropy_normalizer;  // [1], or null for the reduction's own
  void* loss;                                     // [1]
  double* metrics;                                // [kObjectiveMetrics]
  void *dlogp, *dentropy;                         // [tokens], dloss / dlogp and dloss / dentropy; or null
  int threads;
};

// One read and one write of the logits: statistics, each row's coefficients, the gradient of the loss.
struct PolicySweepParams {
  // of whole rows in their order, without an index; its out takes logp, row_max and log_sum_exp, with an entropy bonus
  // entropy too, and lse if that is wanted
  TokenStatsForwardParams stats;
  PolicyObjectiveParams objective;  // token-level; logp, entropy, loss and metrics are not used
  void* dlogits;  // [rows, vocab] contiguous, logits' dtype, apart from them; every element is written
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
