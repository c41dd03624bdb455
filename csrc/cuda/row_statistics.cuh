// The statistics of one row of logits.
//
// A warp reduces a segment, and column c of a segment is always the same lane's, whatever the row's alignment, the
// batch or the launch; segments are merged from left to right. So a row's bits depend on its logits alone.
#pragma once

#include "../row_output.h"
#include "block_reduce.cuh"
#include "rows.cuh"

namespace rlk {
namespace cuda {

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
  for (int64_t i = 0; i < count; ++i) state->merge(segments[i], k);
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

}  // namespace cuda
}  // namespace rlk
