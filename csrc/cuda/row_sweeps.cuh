// One row of logits at a time: its statistics, and its gradient.
//
// A warp reduces a segment, and column c of a segment is always the same lane's, whatever the row's alignment, the
// batch or the launch; segments are merged from left to right. So a row's bits depend on its logits alone.
#pragma once

#include <limits>
#include <type_traits>

#include "../params.h"
#include "../row_math.h"
#include "block_reduce.cuh"
#include "chunk.cuh"

namespace rlk {
namespace cuda {

constexpr int kRowThreads = 256;
constexpr int kChunksPerLane = 4;  // in flight at once

// What a row kernel is compiled for.
enum class Rows {
  kPlain,   // neighbouring columns, no softcap, no statistics but logp, entropy and lse
  kFull,    // neighbouring columns
  kStrided  // columns apart
};

// Blocks of a row kernel on a multiprocessor: as many as leave it registers enough.
template <class Elem, Rows kRows>
constexpr int kRowBlocks = kRows == Rows::kStrided || sizeof(Elem) == 8 ? 1
                           : kRows == Rows::kFull                       ? 2
                                                                        : 3;

template <class Elem>
constexpr int kLaneColumns = kChunksPerLane * kPerChunk<Elem>;
template <class Elem>
constexpr int kBatchColumns = kWarp * kLaneColumns<Elem>;

RLK_DEVICE int lane_index() { return thread_index() % kWarp; }
RLK_DEVICE int warp_index() { return thread_index() / kWarp; }

HOST_DEVICE int64_t segments_of(int64_t width) { return (width + kSegment - 1) / kSegment; }

template <class Elem>
struct LogitsRow {
  const Elem* data;
  int64_t width, stride;
};

template <class Elem>
RLK_DEVICE LogitsRow<Elem> row_of(const LogitsView& view, int64_t row) {
  return {static_cast<const Elem*>(view.data) + view.row_offset(row), view.vocab, view.stride_vocab};
}

// Columns of a row that chunks can be read at: those whose aligned neighbourhood is inside the row.
struct SafeColumns {
  int64_t begin, end;

  HOST_DEVICE bool contain(int64_t from, int64_t to) const { return from >= begin && to <= end; }
};

template <class Elem>
RLK_DEVICE SafeColumns safe_columns(int64_t width, int shift) {
  if (shift == 0) return {0, width};
  return {shift / static_cast<int>(sizeof(Elem)), width - (kChunkBytes - shift) / static_cast<int>(sizeof(Elem))};
}

// The chunk at a column; columns outside the row are not read and come as 0 bits.
template <class Elem, bool kStrided>
RLK_DEVICE Chunk read_some(const LogitsRow<Elem>& row, int64_t column) {
  Elem elements[kPerChunk<Elem>] = {};
  RLK_UNROLL
  for (int i = 0; i < kPerChunk<Elem>; ++i) {
    const int64_t c = column + i;
    if (c >= 0 && c < row.width) elements[i] = row.data[kStrided ? c * row.stride : c];
  }
  return pack(elements);
}

template <class Elem, bool kStrided>
RLK_DEVICE Chunk read_all(const LogitsRow<Elem>& row, int64_t column, int shift) {
  if constexpr (kStrided) {
    return read_some<Elem, true>(row, column);
  } else {
    return load(row.data + column, shift);
  }
}

template <class T>
RLK_DEVICE bool is_positive(T x) {
  return x > 0 && x < std::numeric_limits<T>::infinity();
}

// A label or a number that cannot be computed with makes k NaN, and with it whatever is made of k.
template <class T>
RLK_DEVICE RowTransform<T> transform_of_row(const RowScaling& scaling, int64_t row, bool label_is_valid) {
  const T temperature = static_cast<const T*>(scaling.temperature)[row * scaling.temperature_stride];
  const T* const softcap = static_cast<const T*>(scaling.softcap);
  const T logit_scale = *static_cast<const T*>(scaling.logit_scale);
  const bool is_valid = label_is_valid && is_positive(temperature) && is_positive(logit_scale) &&
                        (softcap == nullptr || is_positive(*softcap));
  return RowTransform<T>(is_valid ? temperature : std::numeric_limits<double>::quiet_NaN(), softcap, logit_scale);
}

// u of a logit.
template <bool kCanBeCapped, class T>
RLK_DEVICE T transformed(T x, const RowTransform<T>& transform) {
  return kCanBeCapped && transform.capped ? tanh_with_slope(transform.inner_scale * x).value : x;
}

// What one lane has seen of a segment, in powers of two: t is the sum of 2^d d.
template <class T>
struct LaneSums {
  T m = -std::numeric_limits<T>::infinity();
  T s = 0, t = 0, q = 0, w = 0;

  // w is the caller's, who knows which columns are padding. Padding is -inf here.
  template <bool kExtras, int kCount>
  RLK_DEVICE void add(const T (&u)[kCount], T k) {
    T top = m;
    RLK_UNROLL
    for (T x : u) top = std::fmax(top, x);
    move_to(top, k);
    const T safe_top = top == -std::numeric_limits<T>::infinity() ? T(0) : top;
    RLK_UNROLL
    for (T x : u) {
      const T d = k * (x - safe_top);
      const T e = std::exp2(d);
      s += e;
      t = std::fma(e, floored(d), t);
      if (kExtras) q = std::fma(e, e, q);
    }
  }

  RLK_DEVICE void move_to(T top, T k) {
    if (m == top) return;
    const T shift = floored(k * (m - top));
    const T factor = std::exp2(shift);
    t = factor * std::fma(s, shift, t);
    s = factor * s;
    q = factor * factor * q;
    m = top;
  }

  // Passes over NaN, which stays in the power of two.
  static RLK_DEVICE T floored(T d) { return std::fmax(d, Exp2Floor<T>::value); }
};

template <class T, class Elem, bool kExtras>
struct SegmentSums {
  LaneSums<T> lane;

  // One chunk after the other; columns from `end` on are padding.
  template <bool kCanBeCapped>
  RLK_DEVICE void add(const Chunk (&chunks)[kChunksPerLane], const RowTransform<T>& transform, int64_t first_column,
                      int64_t end) {
    T u[kLaneColumns<Elem>];
    RLK_UNROLL
    for (int j = 0; j < kChunksPerLane; ++j) {
      Elem elements[kPerChunk<Elem>];
      unpack(chunks[j], elements);
      RLK_UNROLL
      for (int i = 0; i < kPerChunk<Elem>; ++i) {
        const bool is_padding = first_column + j * kWarp * kPerChunk<Elem> + i >= end;
        const T x = transformed<kCanBeCapped>(static_cast<T>(widen(elements[i])), transform);
        u[j * kPerChunk<Elem> + i] = is_padding ? -std::numeric_limits<T>::infinity() : x;
        if (kExtras) lane.w += is_padding ? T(0) : x;
      }
    }
    lane.template add<kExtras>(u, transform.k_log2e);
  }
};

// Where a row's chunks are kept beside being looked at; null for nowhere.
template <class Elem>
struct Stage {
  Elem* row;

  RLK_DEVICE void keep(const Chunk& chunk, int64_t column) const { store_aligned(chunk, row + column); }
};
struct NoStage {
  RLK_DEVICE void keep(const Chunk&, int64_t) const {}
};

// The largest u of columns [begin, end), by all lanes of a warp.
template <class Elem, bool kStrided, class T>
RLK_DEVICE T largest(const LogitsRow<Elem>& row, int64_t begin, int64_t end, const RowTransform<T>& transform) {
  T top = -std::numeric_limits<T>::infinity();
  for (int64_t c = begin + lane_index(); c < end; c += kWarp) {
    const T u = transformed<true>(static_cast<T>(widen(row.data[kStrided ? c * row.stride : c])), transform);
    top = u > top ? u : top;
  }
  return warp_max(top);
}

// The state of the segment that begins at a column, by all lanes of a warp. y is the target's column.
template <class Elem, Rows kRows, class T, class Keep = NoStage>
RLK_DEVICE RowState<double> segment_state(const LogitsRow<Elem>& row, int64_t begin, int64_t y,
                                          const RowTransform<T>& transform, Keep stage = {}) {
  constexpr bool kStrided = kRows == Rows::kStrided, kExtras = kRows != Rows::kPlain;
  const int64_t end = begin + kSegment < row.width ? begin + kSegment : row.width;
  const int shift = kStrided ? 0 : misalignment(row.data);
  const SafeColumns safe = safe_columns<Elem>(row.width, shift);
  SegmentSums<T, Elem, kExtras> sums;

  const auto lane_column = [&](int64_t batch) { return batch + lane_index() * kPerChunk<Elem>; };
  const auto add_edge = [&](int64_t batch) {
    Chunk chunks[kChunksPerLane];
    RLK_UNROLL
    for (int j = 0; j < kChunksPerLane; ++j) {
      const int64_t column = lane_column(batch) + j * kWarp * kPerChunk<Elem>;
      chunks[j] = safe.contain(column, column + kPerChunk<Elem>) ? read_all<Elem, kStrided>(row, column, shift)
                                                                 : read_some<Elem, kStrided>(row, column);
      if (column < end) stage.keep(chunks[j], column);
    }
    sums.template add<kExtras>(chunks, transform, lane_column(batch), end);
  };

  int64_t batch = begin;
  const int64_t body_end = end < safe.end ? end : safe.end;
  if (batch < safe.begin) {
    add_edge(batch);
    batch += kBatchColumns<Elem>;
  }
  for (; batch + kBatchColumns<Elem> <= body_end; batch += kBatchColumns<Elem>) {
    Chunk chunks[kChunksPerLane];
    RLK_UNROLL
    for (int j = 0; j < kChunksPerLane; ++j) {
      chunks[j] = read_all<Elem, kStrided>(row, lane_column(batch) + j * kWarp * kPerChunk<Elem>, shift);
    }
    RLK_UNROLL
    for (int j = 0; j < kChunksPerLane; ++j) {
      stage.keep(chunks[j], lane_column(batch) + j * kWarp * kPerChunk<Elem>);
    }
    sums.template add<kExtras>(chunks, transform, 0, kSegment);
  }
  for (; batch < end; batch += kBatchColumns<Elem>) add_edge(batch);

  LaneSums<T>& lane = sums.lane;
  const T top = warp_max(lane.m);
  lane.move_to(top, transform.k_log2e);
  RowState<double> state;
  state.m = top;
  state.s = warp_sum(static_cast<double>(lane.s));
  state.t = kLn2 * warp_sum(static_cast<double>(lane.t));
  if (kExtras) {
    state.q = warp_sum(static_cast<double>(lane.q));
    state.w = warp_sum(static_cast<double>(lane.w));
  }
  if (y >= begin && y < end) {
    const T x = static_cast<T>(widen(row.data[kStrided ? y * row.stride : y]));
    state.target = transformed<kExtras>(x, transform);
  }
  if (kExtras && y >= begin) {
    state.max_before_target = y < end ? double{largest<Elem, kStrided>(row, begin, y, transform)} : state.m;
  }
  return state;
}

// Merges `count` segments' states, from left to right.
RLK_DEVICE void append_segments(const RowState<double>* segments, int64_t count, double k, RowState<double>* state) {
  for (int64_t i = 0; i < count; ++i) {
    const RowState<double> segment = segments[i];
    state->target += segment.target;
    if (segment.max_before_target > state->max_before_target) state->max_before_target = segment.max_before_target;
    state->merge(segment, k);
  }
}

constexpr int kSegmentsAtOnce = 64;  // states in shared memory: 262,144 columns

// Appends a row to thread 0's state, by all threads of a block.
template <class Elem, Rows kRows, class T, class Keep = NoStage>
RLK_DEVICE void push_row(const LogitsRow<Elem>& row, int64_t y, const RowTransform<T>& transform,
                         RowState<double>* state, Keep stage = {}) {
  RLK_SHARED(RowState<double>, states, kSegmentsAtOnce);
  const int64_t segments = segments_of(row.width);
  for (int64_t first = 0; first < segments; first += kSegmentsAtOnce) {
    const int64_t count = segments - first < kSegmentsAtOnce ? segments - first : kSegmentsAtOnce;
    for (int64_t i = warp_index(); i < count; i += block_size() / kWarp) {
      const RowState<double> segment = segment_state<Elem, kRows>(row, (first + i) * kSegment, y, transform, stage);
      if (lane_index() == 0) states[i] = segment;
    }
    __syncthreads();
    if (thread_index() == 0) append_segments(states, count, transform.k, state);
    __syncthreads();  // the states have been read before the next ones take their place
  }
}

template <class T>
RLK_DEVICE void write(void* out, int64_t row, double value) {
  if (out) static_cast<T*>(out)[row] = static_cast<T>(value);
}

template <class T>
RLK_DEVICE void write_stats(const RowStatsOut& out, int64_t row, double m, const RowStats<double>& stats) {
  write<T>(out.logp, row, stats.logp);
  write<T>(out.entropy, row, stats.entropy);
  write<T>(out.lse, row, stats.lse);
  write<T>(out.log_sum_sq_probs, row, stats.log_sum_sq_probs);
  write<T>(out.mean_logits, row, stats.mean_logits);
  if (out.is_top1) out.is_top1[row] = stats.is_top1;
  write<T>(out.row_max, row, m);
  write<T>(out.log_sum_exp, row, stats.log_s);
}

// Which part of a row a block is for.
struct Piece {
  int64_t index, count;
};

// A row of the gradient in aligned chunks; the first and the last may stick out of it.
template <class Elem>
struct OutRow {
  Elem* data;
  int64_t width;
  int skew;  // columns that the first chunk sticks out

  RLK_DEVICE OutRow(Elem* data_, int64_t width_)
      : data(data_), width(width_), skew(misalignment(data_) / static_cast<int>(sizeof(Elem))) {}

  RLK_DEVICE int64_t batches() const { return (width + skew + kBatchColumns<Elem> - 1) / kBatchColumns<Elem>; }
  RLK_DEVICE int64_t batch_begin(int64_t batch) const { return batch * kBatchColumns<Elem> - skew; }
  RLK_DEVICE int64_t batch_of(int64_t column) const { return (column + skew) / kBatchColumns<Elem>; }

  RLK_DEVICE void store_some(const Chunk& chunk, int64_t column) const {
    Elem elements[kPerChunk<Elem>];
    unpack(chunk, elements);
    RLK_UNROLL
    for (int i = 0; i < kPerChunk<Elem>; ++i) {
      const int64_t c = column + i;
      if (c >= 0 && c < width) data[c] = elements[i];
    }
  }
};

// Calls write_inside(batch) for whole batches of a piece that lie in [safe.begin, safe.end), write_edge for others.
template <class Elem, class Inside, class Edge>
RLK_DEVICE void for_each_batch(const OutRow<Elem>& out, Piece piece, SafeColumns safe, Inside write_inside,
                               Edge write_edge) {
  const int64_t last = out.batches() * (piece.index + 1) / piece.count;
  const int64_t warps = block_size() / kWarp;
  int64_t batch = out.batches() * piece.index / piece.count + warp_index();
  const auto is_inside = [&](int64_t i) {
    return safe.contain(out.batch_begin(i), out.batch_begin(i) + kBatchColumns<Elem>);
  };
  if (batch < last && !is_inside(batch)) {
    write_edge(batch);
    batch += warps;
  }
  for (; batch < last && is_inside(batch); batch += warps) write_inside(batch);
  for (; batch < last; batch += warps) write_edge(batch);
}

template <class Elem>
RLK_DEVICE void write_zeros(Elem* data, int64_t width, Piece piece) {
  const OutRow<Elem> out(data, width);
  const auto column_of = [&](int64_t batch, int j) {
    return out.batch_begin(batch) + (j * kWarp + lane_index()) * kPerChunk<Elem>;
  };
  for_each_batch(
      out, piece, {0, width},
      [&](int64_t batch) {
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) store_to_global(Chunk{}, out.data + column_of(batch, j));
      },
      [&](int64_t batch) {
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) out.store_some(Chunk{}, column_of(batch, j));
      });
}

// What a row's gradient is formed from: upstream gradients, and what forward found; all as they are stored.
template <class T>
struct RowCoefficients {
  T dlogp, dentropy, dlse;
  T row_max, log_sum_exp, entropy;

  RLK_DEVICE bool are_zero() const { return dlogp == 0 && dentropy == 0 && dlse == 0; }
};

// A piece of a row's gradient, by all threads of a block. Where `dtarget` is given, the target's goes there and leaves
// 0 in its column. `data` may be the row itself.
template <class Elem, Rows kRows, class T>
RLK_DEVICE void write_gradient(const LogitsRow<Elem>& row, int64_t y, const RowTransform<T>& transform,
                               const RowCoefficients<T>& c, Elem* data, T* dtarget, Piece piece) {
  constexpr bool kStrided = kRows == Rows::kStrided, kCanBeCapped = kRows != Rows::kPlain;
  const RowGradient<double> gradient(c.dlogp, c.dentropy, c.dlse, c.entropy, c.log_sum_exp, transform.slope);
  const T a = static_cast<T>(gradient.a), b = static_cast<T>(gradient.b), m = c.row_max, k = transform.k_log2e;
  const OutRow<Elem> out(data, row.width);
  const int shift = kStrided ? 0 : misalignment(row.data - out.skew);
  const SafeColumns safe = safe_columns<Elem>(row.width, shift);

  const auto formed = [&](const Chunk& chunk) {
    Elem elements[kPerChunk<Elem>];
    unpack(chunk, elements);
    RLK_UNROLL
    for (int i = 0; i < kPerChunk<Elem>; ++i) {
      T u = static_cast<T>(widen(elements[i])), slope = 1;
      if (kCanBeCapped && transform.capped) {
        const Tanh<T> tanh = tanh_with_slope(transform.inner_scale * u);
        u = tanh.value;
        slope = tanh.slope;
      }
      const T d = k * (u - m);
      const T dx = std::exp2(d) * std::fma(b, LaneSums<T>::floored(d), a);
      narrow(kCanBeCapped ? dx * slope : dx, &elements[i]);
    }
    return pack(elements);
  };
  const auto column_of = [&](int64_t batch, int j) {
    return out.batch_begin(batch) + (j * kWarp + lane_index()) * kPerChunk<Elem>;
  };

  // The target's column is the last that its warp writes; it is read before the gradient may have taken its place.
  const int64_t own_batch = y >= 0 && y < row.width ? out.batch_of(y) : -1;
  const int64_t first = out.batches() * piece.index / piece.count;
  const bool has_target = own_batch >= first && own_batch < out.batches() * (piece.index + 1) / piece.count &&
                          (own_batch - first) % (block_size() / kWarp) == warp_index();
  T target_gradient = 0;
  if (has_target) {
    double u = widen(row.data[kStrided ? y * row.stride : y]), tanh_slope = 1;
    if (kCanBeCapped && transform.capped) {
      const Tanh<double> tanh = tanh_with_slope(transform.inner_scale * u);
      u = tanh.value;
      tanh_slope = tanh.slope;
    }
    target_gradient = static_cast<T>(gradient.target(transform.k * (u - m)) * tanh_slope);
    __syncwarp();
  }

  for_each_batch(
      out, piece, safe,
      [&](int64_t batch) {
        Chunk chunks[kChunksPerLane];
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) chunks[j] = read_all<Elem, kStrided>(row, column_of(batch, j), shift);
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) store_to_global(formed(chunks[j]), out.data + column_of(batch, j));
      },
      [&](int64_t batch) {
        RLK_UNROLL
        for (int j = 0; j < kChunksPerLane; ++j) {
          const int64_t column = column_of(batch, j);
          if (safe.contain(column, column + kPerChunk<Elem>)) {
            store_to_global(formed(read_all<Elem, kStrided>(row, column, shift)), out.data + column);
          } else {
            out.store_some(formed(read_some<Elem, kStrided>(row, column)), column);
          }
        }
      });

  if (has_target) {
    __syncwarp();
    if (lane_index() == 0) {
      if (dtarget) {
        *dtarget = target_gradient;
        data[y] = Elem{};
      } else {
        narrow(target_gradient, data + y);
      }
    }
  }
}

template <class Function>
void with_element_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(double{});
    case DType::kFloat32:
      return function(float{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat16:
      return function(Float16{});
  }
}

template <class Function>
void with_rows(const LogitsView& logits, const RowScaling& scaling, bool needs_all_sums, Function function) {
  if (logits.stride_vocab != 1 && logits.vocab > 1) {
    function(std::integral_constant<Rows, Rows::kStrided>{});
  } else if (scaling.softcap || needs_all_sums) {
    function(std::integral_constant<Rows, Rows::kFull>{});
  } else {
    function(std::integral_constant<Rows, Rows::kPlain>{});
  }
}

}  // namespace cuda
}  // namespace rlk
