// Statistics, coefficients and gradient of a row in one kernel: its logits are read once from memory, and for the
// gradient from shared memory where they fit, else from the L2 cache.
//
// Rows that are too few to fill a device, have softcap, columns apart, or are float64 or float16, take a sweep for the
// statistics and one for the gradient, with the coefficients between them.
#include "objective_rows.cuh"
#include "row_gradient.cuh"
#include "row_statistics.cuh"

namespace rlk {
namespace cuda {
namespace {

constexpr int kSweepThreads = 512;
constexpr int kCoefficientThreads = 128;
constexpr int kScaleBatches = 8;  // a warp's

// States, coefficients, and what aligning them adds.
constexpr size_t kSharedBesideRow =
    (kSegmentsAtOnce + 1) * sizeof(RowState<double>) + sizeof(RowCoefficients<float>) + 2 * kChunkBytes;

template <class T>
struct RowUpstream {
  T dlogp, dentropy;
};

// Of a row in use. logp is as it is stored, so that the coefficients are those of two sweeps.
template <class T>
RLK_DEVICE RowUpstream<T> upstream_of_row(const PolicyObjectiveParams& p, const SequenceTotals& totals, int64_t row,
                                          T logp) {
  const int64_t b = sequence_of(p, row);
  const ObjectiveToken token = token_at<T>(p, row, b, logp);
  double slope = 0;
  with_kind(p.options, [&](auto kind) {
    const ObjectiveTerms terms = objective_terms<decltype(kind)::value>(p.options, token, token.log_ratio(), 1.0);
    slope = terms.dlogp + terms.dx;
  });
  return {static_cast<T>(totals.loss_scale(p, b) * slope),
          static_cast<T>(-p.options.entropy_coef * totals.entropy_scale(p, b))};
}

template <class Elem>
size_t staged_bytes(int64_t vocab) {
  return static_cast<size_t>((vocab + kPerChunk<Elem> - 1) / kPerChunk<Elem>) * kChunkBytes;
}

template <class Elem, bool kStaged>
RLK_KERNEL(kSweepThreads, 1)
void policy_sweep_kernel(PolicySweepParams p, SequenceTotals totals) {
  using T = typename ComputeType<Elem>::type;
  RLK_DYNAMIC_SHARED(Elem, staged_row);
  RLK_SHARED(RowState<double>, state, 1);
  RLK_SHARED(RowCoefficients<T>, coefficients, 1);
  const TokenStatsForwardParams& s = p.stats;
  const bool is_first = thread_index() == 0;
  const int64_t row = block_index(), target = s.targets[row];
  Elem* const out = static_cast<Elem*>(p.dlogits) + row * s.vocab;
  if (target == s.ignore_index) {
    if (is_first) write_stats<T>(s.out, row, 0.0, {});
    write_zeros(out, s.vocab, {0, 1});
    return;
  }
  LogitsRow<Elem> logits = row_of<Elem>(s.logits, row);
  const RowTransform<T> transform = transform_of_row<T>(s.scaling, row, target >= 0 && target < s.vocab);
  if (is_first) *state = RowState<double>();
  if constexpr (kStaged) {
    push_row<Elem, Rows::kPlain>(logits, target, transform, state, Stage<Elem>{staged_row});
    logits.data = staged_row;
  } else {
    push_row<Elem, Rows::kPlain>(logits, target, transform, state);
  }
  if (is_first) {
    const RowStats<double> stats = finish(*state, transform.k, static_cast<double>(s.vocab));
    write_stats<T>(s.out, row, state->m, stats);
    const RowUpstream<T> upstream = upstream_of_row(p.objective, totals, row, static_cast<T>(stats.logp));
    *coefficients = {upstream.dlogp,           upstream.dentropy,           T(0),
                     static_cast<T>(state->m), static_cast<T>(stats.log_s), static_cast<T>(stats.entropy)};
  }
  __syncthreads();
  const RowCoefficients<T> c = *coefficients;
  if (c.are_zero()) {
    write_zeros(out, s.vocab, {0, 1});
  } else {
    write_gradient<Elem, Rows::kPlain>(logits, target, transform, c, out, static_cast<T*>(nullptr), {0, 1});
  }
}

template <class T>
RLK_KERNEL(kCoefficientThreads, 1)
void coefficients_kernel(PolicySweepParams p, SequenceTotals totals, T* dlogp, T* dentropy) {
  const int64_t row = block_index() * kCoefficientThreads + thread_index();
  if (row >= p.stats.logits.rows()) return;
  RowUpstream<T> upstream = {};
  if (p.stats.targets[row] != p.stats.ignore_index) {
    upstream = upstream_of_row(p.objective, totals, row, static_cast<const T*>(p.stats.out.logp)[row]);
  }
  dlogp[row] = upstream.dlogp;
  dentropy[row] = upstream.dentropy;
}

template <class Elem>
RLK_KERNEL(kRowThreads, 1)
void scale_kernel(Elem* values, int64_t count, const void* factor, int64_t pieces) {
  using T = typename ComputeType<Elem>::type;
  const T by = *static_cast<const T*>(factor);
  if (by == 1) return;
  const OutRow<Elem> out(values, count);
  const LogitsRow<Elem> row = {values, count, 1};
  const auto scaled = [by](const Chunk& chunk) {
    Elem elements[kPerChunk<Elem>];
    unpack(chunk, elements);
    RLK_UNROLL
    for (int i = 0; i < kPerChunk<Elem>; ++i) narrow(static_cast<T>(widen(elements[i])) * by, &elements[i]);
    return pack(elements);
  };
  const auto column_of = [&](int64_t batch, int j) {
    return out.batch_begin(batch) + (j * kWarp + lane_index()) * kPerChunk<Elem>;
  };
  for_each_batch(
      out, {block_index(), pieces}, {0, count},
      [&](int64_t batch) {
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) {
          Elem* const at = values + column_of(batch, j);
          store_to_global(scaled(load(at, 0)), at);
        }
      },
      [&](int64_t batch) {
        for (int j = 0; j < kChunksPerLane; ++j) {
          out.store_some(scaled(read_some<Elem, false>(row, column_of(batch, j))), column_of(batch, j));
        }
      });
}

bool is_single(const PolicySweepParams& p, int multiprocessors) {
  const DType dtype = p.stats.logits.dtype;
  const bool is_plain = p.stats.scaling.softcap == nullptr && (p.stats.logits.stride_vocab == 1 || p.stats.vocab == 1);
  return is_plain && (dtype == DType::kFloat32 || dtype == DType::kBFloat16) &&
         token_stats_workspace_bytes(p.stats, multiprocessors) == 0;
}

template <class Elem>
void sweep_once(const PolicySweepParams& p, const SequenceTotals& totals, LaunchTarget target, size_t shared_limit) {
  const size_t bytes = staged_bytes<Elem>(p.stats.vocab);
  const int64_t rows = p.stats.logits.rows();
  if (bytes + kSharedBesideRow <= shared_limit) {
    RLK_LAUNCH(target, (policy_sweep_kernel<Elem, true>), rows, kSweepThreads, bytes, p, totals);
  } else {
    RLK_LAUNCH(target, (policy_sweep_kernel<Elem, false>), rows, kSweepThreads, 0, p, totals);
  }
}

template <class T>
void sweep_twice(const PolicySweepParams& p, const SequenceTotals& totals, LaunchTarget target, void* workspace,
                 int multiprocessors) {
  const int64_t rows = p.stats.logits.rows();
  T* const dlogp = static_cast<T*>(workspace);
  T* const dentropy = dlogp + rows;
  // rows of float take an even number of floats, so the states are aligned
  const bool is_split = token_stats_workspace_bytes(p.stats, multiprocessors) > 0;
  token_stats_forward(p.stats, target, is_split ? dentropy + rows : nullptr);
  RLK_LAUNCH(target, (coefficients_kernel<T>), (rows + kCoefficientThreads - 1) / kCoefficientThreads,
             kCoefficientThreads, 0, p, totals, dlogp, dentropy);
  const TokenStatsForwardParams& s = p.stats;
  const bool has_bonus = p.objective.options.entropy_coef != 0;
  token_stats_backward(
      {s.logits, s.vocab, 0, s.targets, s.ignore_index, s.scaling, dlogp, has_bonus ? dentropy : nullptr, nullptr,
       s.out.row_max, s.out.log_sum_exp, has_bonus ? s.out.entropy : nullptr, p.dlogits, nullptr, 0},
      target, multiprocessors);
}

size_t compute_bytes(DType dtype) { return dtype == DType::kFloat64 ? sizeof(double) : sizeof(float); }

}  // namespace

size_t policy_sweep_workspace_bytes(const PolicySweepParams& p, int multiprocessors) {
  const size_t totals = SequenceTotals::bytes(p.objective);
  if (is_single(p, multiprocessors)) return totals;
  return totals + 2 * static_cast<size_t>(p.stats.logits.rows()) * compute_bytes(p.stats.logits.dtype) +
         token_stats_workspace_bytes(p.stats, multiprocessors);
}

void policy_sweep(const PolicySweepParams& p, LaunchTarget target, void* workspace, int multiprocessors,
                  size_t shared_limit) {
  const bool is_double = p.stats.logits.dtype == DType::kFloat64;
  const SequenceTotals totals(p.objective, workspace);
  void* const rest = static_cast<char*>(workspace) + SequenceTotals::bytes(p.objective);
  if (is_double) {
    find_totals<double>(p.objective, totals, target);
  } else {
    find_totals<float>(p.objective, totals, target);
  }
  if (!is_single(p, multiprocessors)) {
    if (is_double) {
      sweep_twice<double>(p, totals, target, rest, multiprocessors);
    } else {
      sweep_twice<float>(p, totals, target, rest, multiprocessors);
    }
  } else if (p.stats.logits.dtype == DType::kFloat32) {
    sweep_once<float>(p, totals, target, shared_limit);
  } else {
    sweep_once<BFloat16>(p, totals, target, shared_limit);
  }
}

void scale_unless_one(void* values, DType dtype, int64_t count, const void* factor, LaunchTarget target) {
  with_element_type(dtype, [&](auto elem) {
    using Elem = decltype(elem);
    const int64_t a_block = int64_t{kScaleBatches} * kRowThreads / kWarp * kBatchColumns<Elem>;
    const int64_t pieces = (count + a_block - 1) / a_block;
    RLK_LAUNCH(target, (scale_kernel<Elem>), pieces, kRowThreads, 0, static_cast<Elem*>(values), count, factor, pieces);
  });
}

}  // namespace cuda
}  // namespace rlk
