// Rows of logits as the kernels read them: where columns are, and what makes z of them.
#pragma once

#include <limits>
#include <type_traits>

#include "../params.h"
#include "../row_math.h"
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

// Where in a tile a label is: outside for one that is bad. As a difference of unsigned numbers it is defined for all.
RLK_DEVICE int64_t column_of(int64_t label, int64_t vocab_start) {
  return static_cast<int64_t>(static_cast<uint64_t>(label) - static_cast<uint64_t>(vocab_start));
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

// The exponent d of a power of two, for where it multiplies it. Passes over NaN, which stays in the power of two.
template <class T>
RLK_DEVICE T floored(T d) {
  return std::fmax(d, Exp2Floor<T>::value);
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
