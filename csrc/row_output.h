// A row's statistics on their way into the caller's tensors.
#pragma once

#include "params.h"
#include "row_math.h"

namespace rlk {

template <class T>
HOST_DEVICE void write(void* out, int64_t row, double value) {
  if (out) static_cast<T*>(out)[row] = static_cast<T>(value);
}

template <class T>
HOST_DEVICE void write_stats(const RowStatsOut& out, int64_t row, double m, const RowStats<double>& stats) {
  write<T>(out.logp, row, stats.logp);
  write<T>(out.entropy, row, stats.entropy);
  write<T>(out.lse, row, stats.lse);
  write<T>(out.log_sum_sq_probs, row, stats.log_sum_sq_probs);
  write<T>(out.mean_logits, row, stats.mean_logits);
  if (out.is_top1) out.is_top1[row] = stats.is_top1;
  write<T>(out.row_max, row, m);
  write<T>(out.log_sum_exp, row, stats.log_s);
}

}  // namespace rlk
