// A row of logits in segments: what its statistics and its gradient share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "../params.h"
#include "../row_math.h"
#include "parallel.h"
#include "vec.h"

namespace rlk {
namespace RLK_ISA {

constexpr size_t kCacheLine = 64;
constexpr int kUnroll = 4;  // vectors at a time
static_assert(kUnroll % 2 == 0, "they are loaded and stored in pairs");
constexpr int64_t kRowGrainBytes = 1 << 18;    // a thread takes at least this much of the logits at a time
constexpr int64_t kStreamFromBytes = 1 << 25;  // a gradient larger than any cache is written past the caches

inline int64_t rows_per_piece(const LogitsView& logits, size_t elem_bytes) {
  const int64_t row_bytes = logits.vocab * static_cast<int64_t>(elem_bytes);
  return row_bytes >= kRowGrainBytes ? 1 : kRowGrainBytes / (row_bytes + 1) + 1;
}

// Whether a gradient is to bypass the caches; one in the logits' place is a tile that is wanted again at once.
inline bool streams(const LogitsView& logits, const void* dlogits, size_t elem_bytes) {
  const int64_t row_bytes = logits.vocab * static_cast<int64_t>(elem_bytes);
  const bool aligned = reinterpret_cast<uintptr_t>(dlogits) % 64 == 0 && row_bytes % 64 == 0;
  return aligned && dlogits != logits.data && logits.rows() * row_bytes >= kStreamFromBytes;
}

// Columns [begin, begin + n) of a row, contiguous: in place where the row is, else gathered into `buffer`.
template <class Elem>
const Elem* contiguous_segment(const Elem* row, int64_t stride, int64_t begin, int64_t n, Elem* buffer) {
  if (stride == 1) return row + begin;
  for (int64_t i = 0; i < n; ++i) buffer[i] = row[(begin + i) * stride];
  return buffer;
}

// u of every column of a segment under softcap. Without softcap u is the logit and nothing is stored.
template <class V, class Elem>
void softcap_segment(const Elem* x, int64_t n, typename V::Scalar inner_scale, typename V::Scalar* u) {
  const V scale(inner_scale);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) tanh_with_slope(scale * V::load(x + i)).value.store(u + i);
  if (i < n) {
    Elem tail[V::kLanes] = {};
    std::memcpy(tail, x + i, (n - i) * sizeof(Elem));
    typename V::Scalar out[V::kLanes];
    tanh_with_slope(scale * V::load(tail)).value.store(out);
    std::memcpy(u + i, out, (n - i) * sizeof(out[0]));
  }
}

template <class T>
RowTransform<T> transform_of_row(const RowScaling& scaling, int64_t row) {
  return RowTransform<T>(static_cast<const T*>(scaling.temperature)[row * scaling.temperature_stride],
                         static_cast<const T*>(scaling.softcap), *static_cast<const T*>(scaling.logit_scale));
}

// Few rows are taken one after the other, each by all threads.
struct Threads {
  int across_rows, within_row;
};
inline Threads split_threads(const LogitsView& logits, int threads) {
  const bool splits_rows = logits.rows() < threads && logits.vocab > kSegment;
  return splits_rows ? Threads{1, threads} : Threads{threads, 1};
}

inline int64_t segments_of(int64_t vocab) { return (vocab + kSegment - 1) / kSegment; }

// body(first, last) for ranges of the segments of a row.
template <class Body>
void for_each_range_of_segments(int64_t vocab, int threads, const Body& body) {
  const int64_t segments = segments_of(vocab);
  for_each_piece(segments, segments / threads + 1, threads,
                 [&](int, int64_t first, int64_t last) { body(first, last); });
}

// body(begin, n) for the columns of each segment of a range.
template <class Body>
void for_each_segment_in(int64_t first, int64_t last, int64_t vocab, const Body& body) {
  for (int64_t begin = first * kSegment; begin < std::min(vocab, last * kSegment); begin += kSegment) {
    body(begin, std::min(kSegment, vocab - begin));
  }
}

template <class Body>
void for_each_segment(int64_t vocab, int threads, const Body& body) {
  for_each_range_of_segments(vocab, threads,
                             [&](int64_t first, int64_t last) { for_each_segment_in(first, last, vocab, body); });
}

// A row's exponentials, each relative to its own segment's maximum, until its gradient is formed from them.
template <class T>
struct KeptRow {
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> exponentials;
  std::vector<T> maxima;

  explicit KeptRow(int64_t vocab) : maxima(segments_of(vocab)) {
    const size_t bytes = maxima.size() * kSegment * sizeof(T);
    exponentials.reset(static_cast<T*>(std::aligned_alloc(kCacheLine, bytes)));
    if (!exponentials) throw std::bad_alloc();
  }
};

}  // namespace RLK_ISA
}  // namespace rlk
