// One row of logits at a time: its gradient.
#pragma once

#include <type_traits>

#include "row_segments.h"

namespace rlk {
namespace RLK_ISA {

template <class V, bool kStream, class Elem>
RLK_INLINE void put(V x, Elem* out) {
  if (kStream) {
    x.stream(out);
  } else {
    x.store(out);
  }
}
template <class V, bool kStream, class Elem>
RLK_INLINE void put_pair(const V* pair, Elem* out) {
  if (kStream) {
    stream_pair(pair, out);
  } else {
    store_pair(pair, out);
  }
}

// body(begin, n) for the columns of each segment of a row, which it writes.
template <bool kStream, class Body>
void write_segments(int64_t vocab, int threads, const Body& body) {
  for_each_range_of_segments(vocab, threads, [&](int64_t first, int64_t last) {
    for_each_segment_in(first, last, vocab, body);
    if (kStream) stream_fence();  // of the thread that wrote
  });
}

template <bool kStream, class Elem>
void write_zeros(int64_t vocab, int threads, Elem* out) {
  using V = typename VectorOf<Elem>::type;
  write_segments<kStream>(vocab, threads, [&](int64_t begin, int64_t n) {
    int64_t i = 0;
    if (kStream) {
      for (; i + V::kLanes <= n; i += V::kLanes) V(0).stream(out + begin + i);
    }
    std::memset(out + begin + i, 0, (n - i) * sizeof(Elem));
  });
}

// dx of one segment, without the target's own column.
template <class V, bool kCapped, bool kStream, class Elem, class T>
void segment_gradient(const Elem* x, int64_t n, const RowTransform<T>& transform, T m, T a, T b, Elem* out) {
  const V k(transform.k_log2e), inner(transform.inner_scale), top(m), floor(Exp2Floor<T>::value), va(a), vb(b);
  const auto gradient = [&](auto count, const V* logit, V* dx) __attribute__((always_inline)) {
    constexpr int kCount = decltype(count)::value;
    V slope[kCount], d[kCount];
    for (int j = 0; j < kCount; ++j) {
      V u = logit[j];
      if (kCapped) {
        const Tanh<V> tanh = tanh_with_slope(inner * u);
        u = tanh.value;
        slope[j] = tanh.slope;
      }
      d[j] = max_keep_second_nan(floor, k * (u - top));
    }
    exp2<kCount>(d, dx);
    for (int j = 0; j < kCount; ++j) {
      dx[j] = dx[j] * fma(vb, d[j], va);
      if (kCapped) dx[j] = dx[j] * slope[j];
    }
  };
  const std::integral_constant<int, kUnroll> several;
  const std::integral_constant<int, 1> one;
  int64_t i = 0;
  for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
    V logit[kUnroll], dx[kUnroll];
    for (int j = 0; j < kUnroll; j += 2) load_pair(x + i + j * V::kLanes, logit + j);
    gradient(several, logit, dx);
    for (int j = 0; j < kUnroll; j += 2) put_pair<V, kStream>(dx + j, out + i + j * V::kLanes);
  }
  V logit, dx;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    logit = V::load(x + i);
    gradient(one, &logit, &dx);
    put<V, kStream>(dx, out + i);
  }
  if (i < n) {
    Elem tail[V::kLanes] = {}, result[V::kLanes];
    std::memcpy(tail, x + i, (n - i) * sizeof(Elem));
    logit = V::load(tail);
    gradient(one, &logit, &dx);
    dx.store(result);
    std::memcpy(out + i, result, (n - i) * sizeof(Elem));
  }
}

// What a row's gradient is formed from: upstream gradients, and what forward found; all as they are stored.
template <class T>
struct RowCoefficients {
  T dlogp, dentropy, dlse;
  T row_max, log_sum_exp, entropy;

  bool are_zero() const { return dlogp == 0 && dentropy == 0 && dlse == 0; }
};

template <class V>
typename V::Scalar first_lane(V x) {
  typename V::Scalar lanes[V::kLanes];
  x.store(lanes);
  return lanes[0];
}

// Gradient of columns [vocab_start, vocab_start + view.vocab) of one row. Where `dtarget` is given, the target's goes
// there and leaves 0 in its column.
template <class Elem, bool kStream, class T>
void write_row_gradient(const LogitsView& view, int64_t row, int64_t vocab_start, int64_t target,
                        const RowTransform<T>& transform, const RowCoefficients<T>& c, int threads, void* dlogits,
                        void* dtarget) {
  using V = typename VectorOf<Elem>::type;
  const int64_t width = view.vocab;
  Elem* out = static_cast<Elem*>(dlogits) + row * width;
  const T m = c.row_max;
  const RowGradient<double> gradient(c.dlogp, c.dentropy, c.dlse, c.entropy, c.log_sum_exp, transform.slope);
  const T a = static_cast<T>(gradient.a), b = static_cast<T>(gradient.b);

  const Elem* logits = static_cast<const Elem*>(view.data) + view.row_offset(row);
  const int64_t y = target - vocab_start;
  const bool has_target = y >= 0 && y < width;
  // read before the gradient may take the logits' place, and transformed as the statistics' was
  T u = has_target ? static_cast<T>(widen(logits[y * view.stride_vocab])) : T(0), tanh_slope = 1;
  if (transform.capped) {
    const Tanh<V> tanh = tanh_with_slope(V(transform.inner_scale) * V(u));
    u = first_lane(tanh.value);
    tanh_slope = first_lane(tanh.slope);
  }
  write_segments<kStream>(width, threads, [&](int64_t begin, int64_t n) {
    alignas(64) Elem gathered[kSegment];
    const Elem* x = contiguous_segment(logits, view.stride_vocab, begin, n, gathered);
    if (transform.capped) {
      segment_gradient<V, true, kStream>(x, n, transform, m, a, b, out + begin);
    } else {
      segment_gradient<V, false, kStream>(x, n, transform, m, a, b, out + begin);
    }
  });

  if (!has_target) return;
  const T target_gradient = static_cast<T>(gradient.target(transform.k * (double(u) - m)) * tanh_slope);
  if (dtarget) {
    static_cast<T*>(dtarget)[row] = target_gradient;
    out[y] = Elem{};
  } else {
    narrow(target_gradient, out + y);
  }
}

// out = e (a + b w), or e a; w = max(floor, k (x - top)) are the exponents that e was made from.
template <class V, bool kEntropy, bool kStream, class Elem>
void kept_segment_gradient(const typename V::Scalar* e, const Elem* x, int64_t n, V k, V top, V a, V b, Elem* out) {
  const V floor(Exp2Floor<typename V::Scalar>::value);
  const auto gradient = [&](V exponential, V u) __attribute__((always_inline)) {
    return exponential * (kEntropy ? fma(b, max_keep_second_nan(floor, k * (u - top)), a) : a);
  };
  int64_t i = 0;
  for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
    V logit[kUnroll], dx[kUnroll];
    for (int j = 0; kEntropy && j < kUnroll; j += 2) load_pair(x + i + j * V::kLanes, logit + j);
    for (int j = 0; j < kUnroll; ++j) dx[j] = gradient(V::load(e + i + j * V::kLanes), logit[j]);
    for (int j = 0; j < kUnroll; j += 2) put_pair<V, kStream>(dx + j, out + i + j * V::kLanes);
  }
  for (; i + V::kLanes <= n; i += V::kLanes) put<V, kStream>(gradient(V::load(e + i), V::load(x + i)), out + i);
  if (i < n) {
    Elem logits[V::kLanes] = {}, result[V::kLanes];
    typename V::Scalar exponentials[V::kLanes] = {};
    std::memcpy(logits, x + i, (n - i) * sizeof(Elem));
    std::memcpy(exponentials, e + i, (n - i) * sizeof(exponentials[0]));
    gradient(V::load(exponentials), V::load(logits)).store(result);
    std::memcpy(out + i, result, (n - i) * sizeof(Elem));
  }
}

// The same gradient from kept exponentials: 2^w is 2^(w_segment + shift), shift = k log2(e) (m_segment - m).
template <class Elem, bool kStream, class T>
void write_kept_gradient(const Elem* x, int64_t vocab, int64_t target, const RowTransform<T>& transform,
                         const RowCoefficients<T>& c, const KeptRow<T>& kept, int threads, Elem* out) {
  using V = typename VectorOf<Elem>::type;
  const RowGradient<double> gradient(c.dlogp, c.dentropy, c.dlse, c.entropy, c.log_sum_exp, transform.slope);
  write_segments<kStream>(vocab, threads, [&](int64_t begin, int64_t n) {
    const T m = kept.maxima[begin / kSegment];
    const bool is_empty = m == -std::numeric_limits<T>::infinity();
    const double shift = is_empty ? 0.0 : double(transform.k_log2e) * (double(m) - c.row_max);
    const double factor = std::exp2(shift);
    const V a(static_cast<T>((gradient.a + gradient.b * shift) * factor)), b(static_cast<T>(gradient.b * factor));
    const V k(transform.k_log2e), top(is_empty ? T(0) : m);
    const T* e = kept.exponentials.get() + begin;
    if (gradient.b != 0) {
      kept_segment_gradient<V, true, kStream>(e, x + begin, n, k, top, a, b, out + begin);
    } else {
      kept_segment_gradient<V, false, kStream>(e, x + begin, n, k, top, a, b, out + begin);
    }
  });
  const double d = transform.k * (double(widen(x[target])) - c.row_max);
  narrow(static_cast<T>(gradient.target(d)), out + target);
}

}  // namespace RLK_ISA
}  // namespace rlk
