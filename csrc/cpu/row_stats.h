// One row of logits at a time: its statistics.
#pragma once

#include <type_traits>

#include "../row_output.h"
#include "row_segments.h"

namespace rlk {
namespace RLK_ISA {

// The maximum is looked for first and runs through a segment fast: all of it has to be there by then. The largest
// segment that is not of doubles has 16 KiB, and a first-level cache 32 or more.
constexpr size_t kPrefetchBytes = 20 << 10;

// Folds the lanes in halves: few dependent steps, and the same order on every instruction set.
template <class V, class Fold>
typename V::Scalar horizontal(V x, Fold fold) {
  typename V::Scalar lanes[V::kLanes];
  x.store(lanes);
  for (int half = V::kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = fold(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// Sums of one segment against its own maximum. kUnroll independent chains hide the latency of the additions.
template <class V, bool kEntropy, bool kExtras>
struct SegmentSums {
  V s[kUnroll], t[kUnroll], q[kUnroll], w[kUnroll];

  SegmentSums() {
    for (int j = 0; j < kUnroll; ++j) s[j] = t[j] = q[j] = w[j] = V(0);
  }

  // Columns of kCount vectors; their exponentials 2^(k (u - m)) are left in `e`.
  template <int kCount>
  RLK_INLINE void add(const V* u, V m, V k, V* e) {
    const V floor(Exp2Floor<typename V::Scalar>::value);
    V d[kCount];
    for (int j = 0; j < kCount; ++j) d[j] = max_keep_second_nan(floor, k * (u[j] - m));
    exp2<kCount>(d, e);
    for (int j = 0; j < kCount; ++j) {
      s[j] = s[j] + e[j];
      if (kEntropy) t[j] = fma(e[j], d[j], t[j]);
      if (kExtras) q[j] = fma(e[j], e[j], q[j]);
      if (kExtras) w[j] = w[j] + u[j];
    }
  }

  // The exponentials also go to `kept`, unless that is a null pointer of type nullptr_t.
  template <class Elem, class Kept>
  void add_segment(const Elem* u, int64_t n, V m, V k, Kept kept) {
    constexpr bool kKeep = !std::is_same_v<Kept, std::nullptr_t>;
    V e[kUnroll];
    const auto keep = [&](int64_t i, int count) __attribute__((always_inline)) {
      if constexpr (kKeep) {
        for (int j = 0; j < count; ++j) e[j].store(kept + i + j * V::kLanes);
      }
    };
    int64_t i = 0;
    for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
      V x[kUnroll];
      for (int j = 0; j < kUnroll; j += 2) load_pair(u + i + j * V::kLanes, x + j);
      // the sums are slow enough for memory to fetch the next segment meanwhile
      for (size_t line = 0; line < kUnroll * V::kLanes * sizeof(Elem); line += kCacheLine) {
        __builtin_prefetch(reinterpret_cast<const char*>(u + i) + kPrefetchBytes + line);
      }
      add<kUnroll>(x, m, k, e);
      keep(i, kUnroll);
    }
    for (; i + V::kLanes <= n; i += V::kLanes) {
      const V x = V::load(u + i);
      add<1>(&x, m, k, e);
      keep(i, 1);
    }
    for (; i < n; ++i) {
      const auto one = add_one(widen(u[i]), m, k);
      if constexpr (kKeep) kept[i] = one;
    }
  }

  // One column past the last full vector: the other lanes hold -inf, which adds 2^floor = 0.
  typename V::Scalar add_one(typename V::Scalar x, V m, V k) {
    typename V::Scalar lanes[V::kLanes];
    for (auto& lane : lanes) lane = -std::numeric_limits<typename V::Scalar>::infinity();
    lanes[0] = x;
    const V u = V::load(lanes), sum = w[0];
    V e;
    add<1>(&u, m, k, &e);
    if (kExtras) {
      for (auto& lane : lanes) lane = 0;
      lanes[0] = x;
      w[0] = sum + V::load(lanes);
    }
    e.store(lanes);
    return lanes[0];
  }

  static double total(const V* parts) {
    return horizontal((parts[0] + parts[1]) + (parts[2] + parts[3]), [](auto a, auto b) { return a + b; });
  }
};

// A NaN logit may or may not become the maximum; it makes the sums NaN either way.
template <class V, class Elem>
typename V::Scalar segment_max(const Elem* u, int64_t n) {
  using T = typename V::Scalar;
  V top[kUnroll];
  for (V& part : top) part = V(-std::numeric_limits<T>::infinity());
  int64_t i = 0;
  for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
    for (int j = 0; j < kUnroll; ++j) top[j] = max_keep_second_nan(V::load(u + i + j * V::kLanes), top[j]);
  }
  for (; i + V::kLanes <= n; i += V::kLanes) top[0] = max_keep_second_nan(V::load(u + i), top[0]);
  T result = horizontal(max_keep_second_nan(max_keep_second_nan(top[0], top[1]), max_keep_second_nan(top[2], top[3])),
                        [](auto a, auto b) { return a > b ? a : b; });
  for (; i < n; ++i) result = u[i] > result ? u[i] : result;
  return result;
}

// 16-bit floats compare as integers: as signed ones where any is positive, as unsigned ones, downwards, where
// all are negative. Twice the lanes and no conversion.
template <class Half>
float segment_max_of_bits(const Half* u, int64_t n) {
  int16_t top_signed = INT16_MIN;
  uint16_t bottom_unsigned = UINT16_MAX;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t bits = u[i].bits;
    const int16_t as_signed = static_cast<int16_t>(bits);
    top_signed = as_signed > top_signed ? as_signed : top_signed;
    bottom_unsigned = bits < bottom_unsigned ? bits : bottom_unsigned;
  }
  return widen(Half{top_signed >= 0 ? static_cast<uint16_t>(top_signed) : bottom_unsigned});
}
template <class V>
float segment_max(const BFloat16* u, int64_t n) {
  return segment_max_of_bits(u, n);
}
template <class V>
float segment_max(const Float16* u, int64_t n) {
  return segment_max_of_bits(u, n);
}

template <class V, bool kEntropy, bool kExtras, class Elem, class Kept>
RowState<double> segment_state(const Elem* u, int64_t n, typename V::Scalar k_log2e, Kept kept) {
  using T = typename V::Scalar;
  const T m = segment_max<V>(u, n);
  const V safe_m(m == -std::numeric_limits<T>::infinity() ? T(0) : m);
  SegmentSums<V, kEntropy, kExtras> sums;
  sums.add_segment(u, n, safe_m, V(k_log2e), kept);
  RowState<double> state;
  state.m = m;
  state.s = sums.total(sums.s);
  if (kEntropy) state.t = kLn2 * sums.total(sums.t);
  if (kExtras) state.q = sums.total(sums.q);
  if (kExtras) state.w = sums.total(sums.w);
  return state;
}

template <class Elem>
double max_of(const Elem* u, int64_t n) {
  double top = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < n; ++i) top = widen(u[i]) > top ? double(widen(u[i])) : top;
  return top;
}

// The state of columns [begin, begin + n), given as u, of a row whose target is column y.
template <class V, bool kEntropy, bool kExtras, class Elem, class Kept = std::nullptr_t>
RowState<double> located_state(const Elem* u, int64_t begin, int64_t n, int64_t y, typename V::Scalar k_log2e,
                               Kept kept = nullptr) {
  RowState<double> state = segment_state<V, kEntropy, kExtras>(u, n, k_log2e, kept);
  if (y >= begin && y < begin + n) state.target = widen(u[y - begin]);
  if (kExtras && y >= begin) state.max_before_target = y < begin + n ? max_of(u, y - begin) : state.m;
  return state;
}

// Appends the segments of a row of `vocab` columns from left to right, whichever thread made them.
template <class StateOfSegment>
void append_segments(int64_t vocab, int threads, double k, RowState<double>* state, const StateOfSegment& of_segment) {
  if (threads == 1) {
    for_each_segment(vocab, 1, [&](int64_t begin, int64_t n) { state->merge(of_segment(begin, n), k); });
    return;
  }
  std::vector<RowState<double>> segments(segments_of(vocab));
  for_each_segment(vocab, threads,
                   [&](int64_t begin, int64_t n) { segments[begin / kSegment] = of_segment(begin, n); });
  for (const RowState<double>& segment : segments) state->merge(segment, k);
}

// Appends columns [vocab_start, vocab_start + logits.vocab) of one row.
template <class Elem, bool kEntropy, bool kExtras>
void push_row(const LogitsView& view, int64_t row, int64_t vocab_start, int64_t target,
              const RowTransform<typename VectorOf<Elem>::type::Scalar>& transform, int threads,
              RowState<double>* state) {
  using V = typename VectorOf<Elem>::type;
  using T = typename V::Scalar;
  const Elem* logits = static_cast<const Elem*>(view.data) + view.row_offset(row);
  const int64_t y = target - vocab_start;
  append_segments(view.vocab, threads, transform.k, state, [&](int64_t begin, int64_t n) {
    alignas(64) Elem gathered[kSegment];
    alignas(64) T capped[kSegment];
    const Elem* x = contiguous_segment(logits, view.stride_vocab, begin, n, gathered);
    if (!transform.capped) return located_state<V, kEntropy, kExtras>(x, begin, n, y, transform.k_log2e);
    softcap_segment<V>(x, n, transform.inner_scale, capped);
    return located_state<V, kEntropy, kExtras>(capped, begin, n, y, transform.k_log2e);
  });
}

// `push_row` of a whole contiguous row without softcap.
template <class Elem, bool kEntropy, class T>
void push_and_keep_row(const Elem* logits, int64_t vocab, int64_t target, const RowTransform<T>& transform, int threads,
                       RowState<double>* state, KeptRow<T>* kept) {
  using V = typename VectorOf<Elem>::type;
  append_segments(vocab, threads, transform.k, state, [&](int64_t begin, int64_t n) {
    const RowState<double> segment = located_state<V, kEntropy, false>(
        logits + begin, begin, n, target, transform.k_log2e, kept->exponentials.get() + begin);
    kept->maxima[begin / kSegment] = static_cast<T>(segment.m);
    return segment;
  });
}

}  // namespace RLK_ISA
}  // namespace rlk
