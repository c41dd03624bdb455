// Row statistics of logits, and their gradient.
#include "row_gradient.cuh"
#include "row_statistics.cuh"

namespace rlk {
namespace cuda {
namespace {

constexpr int kSegmentsPerBlock = kRowThreads / kWarp;  // of a row that is split: one a warp

// With this many rows a multiprocessor, blocks of one row each fill the device.
constexpr int kRowsPerMultiprocessor = 2;

int64_t pieces_of_row(const LogitsView& logits, int multiprocessors) {
  const int64_t enough = int64_t{kRowsPerMultiprocessor} * multiprocessors;
  if (logits.rows() >= enough) return 1;
  return (segments_of(logits.vocab) + kSegmentsPerBlock - 1) / kSegmentsPerBlock;
}

RLK_DEVICE bool has_last_column(const TokenStatsForwardParams& p) { return p.vocab_start + p.logits.vocab == p.vocab; }

template <class T, class Params>
RLK_DEVICE RowTransform<T> transform_of(const Params& p, int64_t row) {
  const int64_t target = p.targets[row];
  return transform_of_row<T>(p.scaling, row, target >= 0 && target < p.vocab && p.logits.has_row(row));
}

// The state of the columns left of this tile.
RLK_DEVICE RowState<double> state_before(const TokenStatsForwardParams& p, int64_t row) {
  if (p.states == nullptr || p.vocab_start == 0) return {};
  return static_cast<const RowState<double>*>(p.states)[row];
}

template <class T>
RLK_DEVICE void hand_on(const TokenStatsForwardParams& p, int64_t row, const RowState<double>& state, double k) {
  if (p.states) static_cast<RowState<double>*>(p.states)[row] = state;
  if (has_last_column(p)) write_stats<T>(p.out, row, state.m, finish(state, k, static_cast<double>(p.vocab)));
}

template <class Elem, Rows kRows>
RLK_KERNEL(kRowThreads, (kRowBlocks<Elem, kRows>))
void token_stats_forward_kernel(TokenStatsForwardParams p) {
  using T = typename ComputeType<Elem>::type;
  const int64_t row = block_index(), target = p.targets[row];
  const bool is_first = thread_index() == 0;
  if (target == p.ignore_index) {
    if (is_first && has_last_column(p)) write_stats<T>(p.out, row, 0.0, {});
    return;
  }
  RLK_SHARED(RowState<double>, state, 1);
  if (is_first) *state = state_before(p, row);
  const RowTransform<T> transform = transform_of<T>(p, row);
  push_row<Elem, kRows>(row_of<Elem>(p.logits, row), column_of(target, p.vocab_start), transform, state);
  if (is_first) hand_on<T>(p, row, *state, transform.k);
}

// A row split over blocks: here its segments' states, below what is made of them.
template <class Elem, Rows kRows>
RLK_KERNEL(kRowThreads, (kRowBlocks<Elem, kRows>))
void token_stats_segments_kernel(TokenStatsForwardParams p, RowState<double>* segments) {
  using T = typename ComputeType<Elem>::type;
  const int64_t count = segments_of(p.logits.vocab);
  const int64_t blocks = (count + kSegmentsPerBlock - 1) / kSegmentsPerBlock;
  const int64_t row = block_index() / blocks, target = p.targets[row];
  const int64_t segment = block_index() % blocks * kSegmentsPerBlock + warp_index();
  if (target == p.ignore_index || segment >= count) return;
  const RowState<double> state = segment_state<Elem, kRows>(row_of<Elem>(p.logits, row), segment * kSegment,
                                                            column_of(target, p.vocab_start), transform_of<T>(p, row));
  if (lane_index() == 0) segments[row * count + segment] = state;
}

template <class T>
RLK_KERNEL(kWarp, 1)
void token_stats_merge_kernel(TokenStatsForwardParams p, const RowState<double>* segments) {
  const int64_t row = block_index() * kWarp + thread_index();
  if (row >= p.logits.rows()) return;
  if (p.targets[row] == p.ignore_index) {
    if (has_last_column(p)) write_stats<T>(p.out, row, 0.0, {});
    return;
  }
  const int64_t count = segments_of(p.logits.vocab);
  const double k = transform_of<T>(p, row).k;
  RowState<double> state = state_before(p, row);
  append_segments(segments + row * count, count, k, &state);
  hand_on<T>(p, row, state, k);
}

template <class T>
RLK_DEVICE T upstream(const void* gradient, int64_t row) {
  return gradient ? static_cast<const T*>(gradient)[row] : T(0);
}

template <class Elem, Rows kRows>
RLK_KERNEL(kRowThreads, (kRowBlocks<Elem, kRows>))
void token_stats_backward_kernel(TokenStatsBackwardParams p, int64_t pieces) {
  using T = typename ComputeType<Elem>::type;
  const int64_t row = block_index() / pieces, target = p.targets[row], width = p.logits.vocab;
  const Piece piece = {block_index() % pieces, pieces};
  Elem* const out = static_cast<Elem*>(p.dlogits) + row * width;
  const RowCoefficients<T> c = {upstream<T>(p.dlogp, row),       upstream<T>(p.dentropy, row),
                                upstream<T>(p.dlse, row),        upstream<T>(p.row_max, row),
                                upstream<T>(p.log_sum_exp, row), upstream<T>(p.entropy, row)};
  if (target == p.ignore_index || c.are_zero()) {
    write_zeros(out, width, piece);
    return;
  }
  T* const dtarget = p.dtarget ? static_cast<T*>(p.dtarget) + row : nullptr;
  write_gradient<Elem, kRows>(row_of<Elem>(p.logits, row), column_of(target, p.vocab_start), transform_of<T>(p, row), c,
                              out, dtarget, piece);
}

template <class Elem, Rows kRows>
void forward(const TokenStatsForwardParams& p, LaunchTarget target, void* workspace) {
  using T = typename ComputeType<Elem>::type;
  const int64_t rows = p.logits.rows(), segments = segments_of(p.logits.vocab);
  if (workspace) {
    const int64_t blocks = (segments + kSegmentsPerBlock - 1) / kSegmentsPerBlock;
    auto* const states = static_cast<RowState<double>*>(workspace);
    RLK_LAUNCH(target, (token_stats_segments_kernel<Elem, kRows>), rows * blocks, kRowThreads, 0, p, states);
    RLK_LAUNCH(target, (token_stats_merge_kernel<T>), (rows + kWarp - 1) / kWarp, kWarp, 0, p, states);
  } else {
    // a tile of no columns behind the last one finishes states: a warp for none, too
    const int64_t warps = segments > 0 ? segments : 1;
    const int threads = static_cast<int>(warps < kRowThreads / kWarp ? warps * kWarp : kRowThreads);
    RLK_LAUNCH(target, (token_stats_forward_kernel<Elem, kRows>), rows, threads, 0, p);
  }
}

}  // namespace

size_t token_stats_workspace_bytes(const TokenStatsForwardParams& p, int multiprocessors) {
  if (pieces_of_row(p.logits, multiprocessors) == 1) return 0;
  return static_cast<size_t>(p.logits.rows() * segments_of(p.logits.vocab)) * sizeof(RowState<double>);
}

void token_stats_forward(const TokenStatsForwardParams& p, LaunchTarget target, void* workspace) {
  with_element_type(p.logits.dtype, [&](auto elem) {
    with_rows(p.logits, p.scaling, p.out.needs_all_sums(),
              [&](auto rows) { forward<decltype(elem), decltype(rows)::value>(p, target, workspace); });
  });
}

void token_stats_backward(const TokenStatsBackwardParams& p, LaunchTarget target, int multiprocessors) {
  with_element_type(p.logits.dtype, [&](auto elem) {
    with_rows(p.logits, p.scaling, false, [&](auto rows) {
      using Elem = decltype(elem);
      constexpr Rows kRows = decltype(rows)::value;
      const int64_t pieces = pieces_of_row(p.logits, multiprocessors);
      RLK_LAUNCH(target, (token_stats_backward_kernel<Elem, kRows>), p.logits.rows() * pieces, kRowThreads, 0, p,
                 pieces);
    });
  });
}

}  // namespace cuda
}  // namespace rlk
