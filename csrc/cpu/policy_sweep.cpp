// Statistics, coefficients and gradient of each row while it is in the cache. Built once per instruction set.
#include "dispatch.h"
#include "objective_rows.h"
#include "parallel.h"
#include "row_gradient.h"
#include "row_stats.h"

namespace rlk {
namespace RLK_ISA {
namespace {

template <class Elem, bool kStream, bool kEntropy, ObjectiveKind kKind, class T>
void sweep_row(const PolicySweepParams& p, const ObjectiveRows<T>& rows, int64_t row, int threads, KeptRow<T>* kept) {
  const TokenStatsForwardParams& s = p.stats;
  const ObjectiveOptions& o = p.objective.options;
  const int64_t target = s.targets[row];
  const Elem* logits = static_cast<const Elem*>(s.logits.data) + s.logits.row_offset(row);
  Elem* out = static_cast<Elem*>(p.dlogits) + row * s.vocab;
  if (target == s.ignore_index) {
    write_stats<T>(s.out, row, 0.0, {});
    write_zeros<kStream>(s.vocab, threads, out);
    return;
  }
  const RowTransform<T> transform = transform_of_row<T>(s.scaling, row);
  RowState<double> state;
  if (kept) {
    push_and_keep_row<Elem, kEntropy>(logits, s.vocab, target, transform, threads, &state, kept);
  } else {
    push_row<Elem, kEntropy, false>(s.logits, row, 0, target, transform, threads, &state);
  }
  const RowStats<double> stats = finish(state, transform.k, static_cast<double>(s.vocab));
  write_stats<T>(s.out, row, state.m, stats);

  const int64_t b = sequence_of(p.objective, row);
  // rounded as the statistics are stored, so that the coefficients are those of two sweeps
  const ObjectiveToken token = token_at<T>(p.objective, row, b, static_cast<T>(stats.logp));
  const ObjectiveTerms terms = objective_terms<kKind>(o, token, token.log_ratio(), 1.0);
  const RowCoefficients<T> c = {static_cast<T>(rows.loss_scale(b) * (terms.dlogp + terms.dx)),
                                static_cast<T>(-o.entropy_coef * rows.entropy_scale(b)),
                                T(0),
                                static_cast<T>(state.m),
                                static_cast<T>(stats.log_s),
                                static_cast<T>(stats.entropy)};
  if (c.are_zero()) {
    write_zeros<kStream>(s.vocab, threads, out);
  } else if (kept) {
    write_kept_gradient<Elem, kStream>(logits, s.vocab, target, transform, c, *kept, threads, out);
  } else {
    write_row_gradient<Elem, kStream>(s.logits, row, 0, target, transform, c, threads, p.dlogits, nullptr);
  }
}

template <class Elem, bool kStream, bool kEntropy>
void sweep(const PolicySweepParams& p) {
  using T = typename VectorOf<Elem>::type::Scalar;
  const ObjectiveRows<T> rows(p.objective);
  const LogitsView& logits = p.stats.logits;
  // softcap's slope needs the logits again, and so do rows that are not in one piece; float32 exponentials take as much
  // cache as float32 logits, beside them
  const bool keeps = sizeof(Elem) < sizeof(T) && p.stats.scaling.softcap == nullptr && logits.stride_vocab == 1;
  const Threads threads = split_threads(logits, p.stats.threads);
  std::vector<KeptRow<T>> kept;
  for (int i = 0; keeps && i < std::min<int64_t>(threads.across_rows, logits.rows()); ++i) {
    kept.emplace_back(logits.vocab);
  }
  with_kind(p.objective.options, [&](auto kind) {
    for_each_row_of_worker(logits.rows(), rows_per_piece(logits, sizeof(Elem)), threads.across_rows,
                           [&](int worker, int64_t row) {
                             sweep_row<Elem, kStream, kEntropy, decltype(kind)::value>(p, rows, row, threads.within_row,
                                                                                       keeps ? &kept[worker] : nullptr);
                           });
  });
}

template <class Elem, bool kStream>
void sweep(const PolicySweepParams& p) {
  if (p.stats.out.entropy) {
    sweep<Elem, kStream, true>(p);
  } else {
    sweep<Elem, kStream, false>(p);
  }
}

}  // namespace

void policy_sweep(const PolicySweepParams& p) {
  with_element_type(p.stats.logits.dtype, [&](auto elem) {
    using Elem = decltype(elem);
    if (streams(p.stats.logits, p.dlogits, sizeof(Elem))) {
      sweep<Elem, true>(p);
    } else {
      sweep<Elem, false>(p);
    }
  });
}

}  // namespace RLK_ISA
}  // namespace rlk
