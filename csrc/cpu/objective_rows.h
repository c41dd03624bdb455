// What the objective's and the sweep's loops know of whole sequences: built once per call, shared by all threads.
#pragma once

#include <algorithm>
#include <vector>

#include "../objective_batch.h"
#include "vec.h"

namespace rlk {
namespace RLK_ISA {

template <class T>
class ObjectiveRows {
 public:
  explicit ObjectiveRows(const PolicyObjectiveParams& params) : p(params), counts_(params.sequences) {
    double tokens = 0;
    for (int64_t b = 0; b < p.sequences; ++b) {
      counts_[b] = static_cast<double>(end(b) - begin(b) - std::count(p.mask + begin(b), p.mask + end(b), uint8_t{0}));
      tokens += counts_[b];
    }
    loss_denominator_ = reduction_denominator(p.reduction, p.normalizer, tokens, p.sequences);
    entropy_denominator_ = reduction_denominator(p.entropy_reduction, p.entropy_normalizer, tokens, p.sequences);
  }

  int64_t begin(int64_t b) const { return sequence_begin(p, b); }
  int64_t end(int64_t b) const { return sequence_end(p, b); }
  int64_t sequences_per_piece(int64_t tokens) const { return tokens * p.sequences / (p.tokens + 1) + 1; }

  double count(int64_t b) const { return counts_[b]; }
  double length(int64_t b) const { return std::max(counts_[b], 1.0); }
  // What a token's loss, and its entropy, is multiplied by on the way to the batch's loss.
  double loss_scale(int64_t b) const { return reduction_scale(p.reduction, loss_denominator_, length(b)); }
  double entropy_scale(int64_t b) const {
    return reduction_scale(p.entropy_reduction, entropy_denominator_, length(b));
  }

 private:
  const PolicyObjectiveParams& p;
  std::vector<double> counts_;
  double loss_denominator_, entropy_denominator_;
};

}  // namespace RLK_ISA
}  // namespace rlk
