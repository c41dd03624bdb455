// Row statistics of logits, and their gradient. Built once per instruction set (see CMakeLists.txt).
#include "dispatch.h"
#include "parallel.h"
#include "row_sweeps.h"

namespace rlk {
namespace RLK_ISA {
namespace {

template <class Elem, bool kEntropy, bool kExtras>
void push(const TokenStatsForwardParams& p, int64_t row) {
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
  push_row<Elem, kEntropy, kExtras>(p.logits, row, p.vocab_start, p.targets[row], transform, state);
  if (is_last) {
    write_stats<T>(p.out, row, state->m, finish(*state, transform.k, static_cast<double>(p.vocab)));
  }
}

template <class T>
T upstream(const void* gradient, int64_t row) {
  return gradient ? static_cast<const T*>(gradient)[row] : T(0);
}

template <class Elem, bool kStream>
void backward_row(const TokenStatsBackwardParams& p, int64_t row) {
  using T = typename VectorOf<Elem>::type::Scalar;
  const RowCoefficients<T> c = {upstream<T>(p.dlogp, row),       upstream<T>(p.dentropy, row),
                                upstream<T>(p.dlse, row),        upstream<T>(p.row_max, row),
                                upstream<T>(p.log_sum_exp, row), upstream<T>(p.entropy, row)};
  if (p.targets[row] == p.ignore_index || c.are_zero()) {
    write_zeros<kStream>(p.logits.vocab, static_cast<Elem*>(p.dlogits) + row * p.logits.vocab);
    return;
  }
  write_row_gradient<Elem, kStream>(p.logits, row, p.vocab_start, p.targets[row], transform_of_row<T>(p.scaling, row),
                                    c, p.dlogits, p.dtarget);
}

template <class Elem>
void forward(const TokenStatsForwardParams& p) {
  const auto run = [&](auto row_function) {
    for_each_row(p.logits.rows(), rows_per_piece(p.logits, sizeof(Elem)), p.threads,
                 [&](int64_t row) { row_function(p, row); });
  };
  if (p.out.needs_all_sums()) {
    run([](const auto& params, int64_t row) { push<Elem, true, true>(params, row); });
  } else if (p.out.entropy) {
    run([](const auto& params, int64_t row) { push<Elem, true, false>(params, row); });
  } else {
    run([](const auto& params, int64_t row) { push<Elem, false, false>(params, row); });
  }
}

template <class Elem>
void backward(const TokenStatsBackwardParams& p) {
  const bool stream = streams(p.logits, p.dlogits, sizeof(Elem));
  for_each_row(p.logits.rows(), rows_per_piece(p.logits, sizeof(Elem)), p.threads, [&](int64_t row) {
    if (stream) {
      backward_row<Elem, true>(p, row);
    } else {
      backward_row<Elem, false>(p, row);
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
