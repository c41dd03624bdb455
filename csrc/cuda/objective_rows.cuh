// What the objective's and the sweep's kernels know of whole sequences, and where they keep it.
#pragma once

#include "../objective_batch.h"
#include "block_reduce.cuh"

namespace rlk {
namespace cuda {

constexpr int kObjectiveThreads = 128;
constexpr int kTotalThreads = 256;

struct BatchTotals {
  double loss_denominator, entropy_denominator;
};

// In a caller's workspace.
struct SequenceTotals {
  BatchTotals* batch;  // [1]
  double* counts;      // [sequences] of trained tokens
  double* log_ratios;  // [sequences] sums or means; null for token-level objectives

  SequenceTotals(const PolicyObjectiveParams& p, void* workspace)
      : batch(static_cast<BatchTotals*>(workspace)),
        counts(reinterpret_cast<double*>(batch + 1)),
        log_ratios(p.options.is_token_level() ? nullptr : counts + p.sequences) {}

  static size_t bytes(const PolicyObjectiveParams& p) {
    return sizeof(BatchTotals) + 2 * static_cast<size_t>(p.sequences) * sizeof(double);
  }

  RLK_DEVICE double length(int64_t b) const { return counts[b] > 1 ? counts[b] : 1.0; }
  RLK_DEVICE double loss_scale(const PolicyObjectiveParams& p, int64_t b) const {
    return reduction_scale(p.reduction, batch->loss_denominator, length(b));
  }
  RLK_DEVICE double entropy_scale(const PolicyObjectiveParams& p, int64_t b) const {
    return reduction_scale(p.entropy_reduction, batch->entropy_denominator, length(b));
  }
};

struct Sum {
  RLK_DEVICE double operator()(double a, double b) const { return a + b; }
};

// One block a sequence: its trained tokens, and the sum or mean of their log ratios.
template <class T>
RLK_KERNEL(kObjectiveThreads, 1)
void sequence_totals_kernel(PolicyObjectiveParams p, SequenceTotals totals) {
  RLK_SHARED(double, count_scratch, kObjectiveThreads / kWarp);
  RLK_SHARED(double, pooled_scratch, kObjectiveThreads / kWarp);
  const int64_t b = block_index(), begin = sequence_begin(p, b), end = sequence_end(p, b);
  double count = 0, pooled = 0;
  for (int64_t i = begin + thread_index(); i < end; i += kObjectiveThreads) count += p.mask[i] != 0;
  if (totals.log_ratios) {
    with_kind(p.options, [&](auto kind) {
      for (int64_t i = begin + thread_index(); i < end; i += kObjectiveThreads) {
        if (!p.mask[i]) continue;
        const ObjectiveToken token = token_at<T>(p, i, b, value_at<T>(p.logp, i));
        pooled += pooled_log_ratio<decltype(kind)::value>(p.options, token).value;
      }
    });
  }
  count = block_reduce<kObjectiveThreads>(count, count_scratch, Sum{});
  pooled = block_reduce<kObjectiveThreads>(pooled, pooled_scratch, Sum{});
  if (thread_index() != 0) return;
  totals.counts[b] = count;
  if (totals.log_ratios) totals.log_ratios[b] = p.options.sums_sequence() || count == 0 ? pooled : pooled / count;
}

// One block: the denominators of the reductions.
RLK_KERNEL(kTotalThreads, 1) void batch_totals_kernel(PolicyObjectiveParams p, SequenceTotals totals) {
  RLK_SHARED(double, scratch, kTotalThreads / kWarp);
  double tokens = 0;
  for (int64_t b = thread_index(); b < p.sequences; b += kTotalThreads) tokens += totals.counts[b];
  tokens = block_reduce<kTotalThreads>(tokens, scratch, Sum{});
  if (thread_index() != 0) return;
  *totals.batch = {reduction_denominator(p.reduction, p.normalizer, tokens, p.sequences),
                   reduction_denominator(p.entropy_reduction, p.entropy_normalizer, tokens, p.sequences)};
}

template <class T>
void find_totals(const PolicyObjectiveParams& p, const SequenceTotals& totals, LaunchTarget target) {
  RLK_LAUNCH(target, (sequence_totals_kernel<T>), p.sequences, kObjectiveThreads, 0, p, totals);
  RLK_LAUNCH(target, (batch_totals_kernel), 1, kTotalThreads, 0, p, totals);
}

}  // namespace cuda
}  // namespace rlk
