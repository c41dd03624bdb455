// Row statistics of logits, and their gradient. Built once per instruction set (see CMakeLists.txt).
#include "dispatch.h"
#include "parallel.h"
#include "row_gradient.h"
#include "row_stats.h"

namespace rlk {
namespace RLK_ISA {
namespace {

template <class Elem, bool kEntropy, bool kExtras>
void push(const TokenStatsForwardParams& p, int64_t row, int threads) {
  using T = typename VectorOf<Elem>::type::Scalar;
  const bool is_last = p.vocab_start + p.logits.vocab == p.vocab;
  if (p.targets[row] == p.ignore_index) {
    if (is_last) write_stats<T>(p.out, row, 0.0, {});
    return;
  }
  RowState<double> fresh;
  RowState<double>* state = p.states ? static_cast<RowState<double>*>(p.states) + row : &fresh;
  if (p.vocab_start == 0) *state = RowState<double>();
  const RowTransform<T> transform = transform_of_row<T>(p.scaling, row);
  push_row<Elem, kEntropy, kExtras>(p.logits, row, p.vocab_start, p.targets[row], transform, threads, state);
  if (is_last) {
    write_stats<T>(p.out, row, state->m, finish(*state, transform.k, static_cast<double>(p.vocab)));
  }
}

template <class T>
T upstream(const void* gradient, int64_t row) {
  return gradient ? static_cast<const T*>(gradient)[row] : T(0);
}

template <class Elem, bool kStream>
void backward_row(const TokenStatsBackwardParams& p, int64_t row, int threads) {
  using T = typename VectorOf<Elem>::type::Scalar;
  const RowCoefficients<T> c = {upstream<T>(p.dlogp, row),       upstream<T>(p.dentropy, row),
                                upstream<T>(p.dlse, row),        upstream<T>(p.row_max, row),
                                upstream<T>(p.log_sum_exp, row), upstream<T>(p.entropy, row)};
  if (p.targets[row] == p.ignore_index || c.are_zero()) {
    write_zeros<kStream>(p.logits.vocab, threads, static_cast<Elem*>(p.dlogits) + row * p.logits.vocab);
    return;
  }
  write_row_gradient<Elem, kStream>(p.logits, row, p.vocab_start, p.targets[row], transform_of_row<T>(p.scaling, row),
                                    c, threads, p.dlogits, p.dtarget);
}

// body(row, threads that share the row)
template <class Elem, class Body>
void for_each_row_split(const LogitsView& logits, int threads, const Body& body) {
  const Threads split = split_threads(logits, threads);
  for_each_row(logits.rows(), rows_per_piece(logits, sizeof(Elem)), split.across_rows,
               [&](int64_t row) { body(row, split.within_row); });
}

template <class Elem>
void forward(const TokenStatsForwardParams& p) {
  for_each_row_split<Elem>(p.logits, p.threads, [&](int64_t row, int threads) {
    if (p.out.needs_all_sums()) {
      push<Elem, true, true>(p, row, threads);
    } else if (p.out.entropy) {
      push<Elem, true, false>(p, row, threads);
    } else {
      push<Elem, false, false>(p, row, threads);
    }
  });
}

template <class Elem>
void backward(const TokenStatsBackwardParams& p) {
  const bool stream = streams(p.logits, p.dlogits, sizeof(Elem));
  for_each_row_split<Elem>(p.logits, p.threads, [&](int64_t row, int threads) {
    if (stream) {
      backward_row<Elem, true>(p, row, threads);
    } else {
      backward_row<Elem, false>(p, row, threads);
    }
  });
}

}  // namespace

void token_stats_forward(const TokenStatsForwardParams& params) {
  with_element_type(params.logits.dtype, [&](auto elem) { forward<decltype(elem)>(params); });
}

void token_stats_backward(const TokenStatsBackwardParams& params) {
  with_element_type(params.logits.dtype, [&](auto elem) { backward<decltype(elem)>(params); });
}

}  // namespace RLK_ISA
}  // namespace rlk
