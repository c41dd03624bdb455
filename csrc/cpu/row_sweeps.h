// One row of logits at a time: its statistics, and its gradient.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "../params.h"
#include "../row_math.h"
#include "vec.h"

namespace rlk {
namespace RLK_ISA {

constexpr size_t kCacheLine = 64;
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
  static constexpr int kUnroll = 4;
  V s[kUnroll], t[kUnroll], q[kUnroll], w[kUnroll];

  SegmentSums() {
    for (int j = 0; j < kUnroll; ++j) s[j] = t[j] = q[j] = w[j] = V(0);
  }

  // Returns 2^d.
  RLK_INLINE V add(int j, V u, V m, V k, V floor) {
    const V d = max_keep_second_nan(floor, k * (u - m));
    const V e = exp2(d);
    s[j] = s[j] + e;
    if (kEntropy) t[j] = fma(e, d, t[j]);
    if (kExtras) q[j] = fma(e, e, q[j]);
    return e;
  }

  // The exponentials also go to `kept`, unless that is a null pointer of type nullptr_t.
  template <class Elem, class Kept>
  void add_segment(const Elem* u, int64_t n, V m, V k, V floor, Kept kept) {
    constexpr bool kKeep = !std::is_same_v<Kept, std::nullptr_t>;
    const auto keep = [&](V e, int64_t i) __attribute__((always_inline)) {
      if constexpr (kKeep) e.store(kept + i);
    };
    int64_t i = 0;
    for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
      V x[kUnroll];
      for (int j = 0; j < kUnroll; j += 2) load_pair(u + i + j * V::kLanes, x + j);
      // the sums are slow enough for memory to fetch the next segment meanwhile
      for (size_t line = 0; line < kUnroll * V::kLanes * sizeof(Elem); line += kCacheLine) {
        __builtin_prefetch(reinterpret_cast<const char*>(u + i + kSegment) + line);
      }
      for (int j = 0; j < kUnroll; ++j) {
        keep(add(j, x[j], m, k, floor), i + j * V::kLanes);
        if (kExtras) w[j] = w[j] + x[j];
      }
    }
    for (; i + V::kLanes <= n; i += V::kLanes) {
      const V x = V::load(u + i);
      keep(add(0, x, m, k, floor), i);
      if (kExtras) w[0] = w[0] + x;
    }
    for (; i < n; ++i) {
      const auto e = add_one(widen(u[i]), m, k, floor);
      if constexpr (kKeep) kept[i] = e;
    }
  }

  // One column past the last full vector: the other lanes hold -inf, which adds 2^floor = 0.
  typename V::Scalar add_one(typename V::Scalar x, V m, V k, V floor) {
    typename V::Scalar lanes[V::kLanes];
    for (auto& lane : lanes) lane = -std::numeric_limits<typename V::Scalar>::infinity();
    lanes[0] = x;
    const V e = add(0, V::load(lanes), m, k, floor);
    if (kExtras) {
      for (auto& lane : lanes) lane = 0;
      lanes[0] = x;
      w[0] = w[0] + V::load(lanes);
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
  constexpr int kUnroll = 4;
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
  sums.add_segment(u, n, safe_m, V(k_log2e), V(Exp2Floor<T>::value), kept);
  RowState<double> state;
  state.m = m;
  state.s = sums.total(sums.s);
  state.t = kLn2 * sums.total(sums.t);
  state.q = sums.total(sums.q);
  state.w = sums.total(sums.w);
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

template <class T>
RowTransform<T> transform_of_row(const RowScaling& scaling, int64_t row) {
  return RowTransform<T>(static_cast<const T*>(scaling.temperature)[row * scaling.temperature_stride],
                         static_cast<const T*>(scaling.softcap), *static_cast<const T*>(scaling.logit_scale));
}

template <class T>
void write(void* out, int64_t row, double value) {
  if (out) static_cast<T*>(out)[row] = static_cast<T>(value);
}

// Appends columns [vocab_start, vocab_start + logits.vocab) of one row.
template <class Elem, bool kEntropy, bool kExtras>
void push_row(const LogitsView& view, int64_t row, int64_t vocab_start, int64_t target,
              const RowTransform<typename VectorOf<Elem>::type::Scalar>& transform, RowState<double>* state) {
  using V = typename VectorOf<Elem>::type;
  using T = typename V::Scalar;
  const Elem* logits = static_cast<const Elem*>(view.data) + view.row_offset(row);
  alignas(64) Elem gathered[kSegment];
  alignas(64) T capped[kSegment];
  for (int64_t begin = 0; begin < view.vocab; begin += kSegment) {
    const int64_t n = view.vocab - begin < kSegment ? view.vocab - begin : kSegment;
    const int64_t y = target - vocab_start;
    const Elem* x = contiguous_segment(logits, view.stride_vocab, begin, n, gathered);
    RowState<double> segment;
    if (transform.capped) {
      softcap_segment<V>(x, n, transform.inner_scale, capped);
      segment = located_state<V, kEntropy, kExtras>(capped, begin, n, y, transform.k_log2e);
    } else {
      segment = located_state<V, kEntropy, kExtras>(x, begin, n, y, transform.k_log2e);
    }
    state->target += segment.target;
    if (kExtras && segment.max_before_target > state->max_before_target) {
      state->max_before_target = segment.max_before_target;
    }
    state->merge(segment, transform.k);
  }
}

// A row's exponentials, each relative to its own segment's maximum, until its gradient is formed from them.
template <class T>
struct KeptRow {
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T[], Free> exponentials;
  std::vector<T> maxima;

  explicit KeptRow(int64_t vocab) : maxima((vocab + kSegment - 1) / kSegment) {
    const size_t bytes = maxima.size() * kSegment * sizeof(T);
    exponentials.reset(static_cast<T*>(std::aligned_alloc(kCacheLine, bytes)));
    if (!exponentials) throw std::bad_alloc();
  }
};

// `push_row` of a whole contiguous row without softcap.
template <class Elem, bool kEntropy, class T>
void push_and_keep_row(const Elem* logits, int64_t vocab, int64_t target, const RowTransform<T>& transform,
                       RowState<double>* state, KeptRow<T>* kept) {
  using V = typename VectorOf<Elem>::type;
  for (int64_t begin = 0; begin < vocab; begin += kSegment) {
    const int64_t n = vocab - begin < kSegment ? vocab - begin : kSegment;
    const RowState<double> segment = located_state<V, kEntropy, false>(
        logits + begin, begin, n, target, transform.k_log2e, kept->exponentials.get() + begin);
    kept->maxima[begin / kSegment] = static_cast<T>(segment.m);
    state->target += segment.target;
    state->merge(segment, transform.k);
  }
}

template <class T>
void write_stats(const RowStatsOut& out, int64_t row, double m, const RowStats<double>& stats) {
  write<T>(out.logp, row, stats.logp);
  write<T>(out.entropy, row, stats.entropy);
  write<T>(out.lse, row, stats.lse);
  write<T>(out.log_sum_sq_probs, row, stats.log_sum_sq_probs);
  write<T>(out.mean_logits, row, stats.mean_logits);
  if (out.is_top1) out.is_top1[row] = stats.is_top1;
  write<T>(out.row_max, row, m);
  write<T>(out.log_sum_exp, row, stats.log_s);
}

template <class V, bool kStream, class Elem>
RLK_INLINE void put(V x, Elem* out) {
  if (kStream) {
    x.stream(out);
  } else {
    x.store(out);
  }
}

template <bool kStream, class Elem>
void write_zeros(int64_t n, Elem* out) {
  using V = typename VectorOf<Elem>::type;
  int64_t i = 0;
  if (kStream) {
    for (; i + V::kLanes <= n; i += V::kLanes) V(0).stream(out + i);
    stream_fence();
  }
  std::memset(out + i, 0, (n - i) * sizeof(Elem));
}

// dx of one segment, without the target's own column.
template <class V, bool kCapped, bool kStream, class Elem, class T>
void segment_gradient(const Elem* x, int64_t n, const RowTransform<T>& transform, T m, T a, T b, Elem* out) {
  const V k(transform.k_log2e), inner(transform.inner_scale), top(m), floor(Exp2Floor<T>::value), va(a), vb(b);
  const auto gradient = [&](V u) __attribute__((always_inline)) {
    V slope(1);
    if (kCapped) {
      const Tanh<V> tanh = tanh_with_slope(inner * u);
      u = tanh.value;
      slope = tanh.slope;
    }
    const V d = max_keep_second_nan(floor, k * (u - top));
    const V dz = exp2(d) * fma(vb, d, va);
    return kCapped ? dz * slope : dz;
  };
  constexpr int kUnroll = 4;
  int64_t i = 0;
  for (; i + kUnroll * V::kLanes <= n; i += kUnroll * V::kLanes) {
    V logit[kUnroll];
    for (int j = 0; j < kUnroll; j += 2) load_pair(x + i + j * V::kLanes, logit + j);
    for (int j = 0; j < kUnroll; ++j) put<V, kStream>(gradient(logit[j]), out + i + j * V::kLanes);
  }
  for (; i + V::kLanes <= n; i += V::kLanes) put<V, kStream>(gradient(V::load(x + i)), out + i);
  if (i < n) {
    Elem tail[V::kLanes] = {}, result[V::kLanes];
    std::memcpy(tail, x + i, (n - i) * sizeof(Elem));
    gradient(V::load(tail)).store(result);
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

// Gradient of columns [vocab_start, vocab_start + view.vocab) of one row. Where `dtarget` is given, the target's goes
// there and leaves 0 in its column.
template <class Elem, bool kStream, class T>
void write_row_gradient(const LogitsView& view, int64_t row, int64_t vocab_start, int64_t target,
                        const RowTransform<T>& transform, const RowCoefficients<T>& c, void* dlogits, void* dtarget) {
  using V = typename VectorOf<Elem>::type;
  const int64_t width = view.vocab;
  Elem* out = static_cast<Elem*>(dlogits) + row * width;
  const T m = c.row_max;
  const RowGradient<double> gradient(c.dlogp, c.dentropy, c.dlse, c.entropy, c.log_sum_exp, transform.slope);
  const T a = static_cast<T>(gradient.a), b = static_cast<T>(gradient.b);

  const Elem* logits = static_cast<const Elem*>(view.data) + view.row_offset(row);
  alignas(64) Elem gathered[kSegment];
  const int64_t y = target - vocab_start;
  const bool has_target = y >= 0 && y < width;
  // read before the gradient may take the logits' place
  double u = has_target ? widen(logits[y * view.stride_vocab]) : 0.0, tanh_slope = 1;
  for (int64_t begin = 0; begin < width; begin += kSegment) {
    const int64_t n = width - begin < kSegment ? width - begin : kSegment;
    const Elem* x = contiguous_segment(logits, view.stride_vocab, begin, n, gathered);
    if (transform.capped) {
      segment_gradient<V, true, kStream>(x, n, transform, m, a, b, out + begin);
    } else {
      segment_gradient<V, false, kStream>(x, n, transform, m, a, b, out + begin);
    }
  }
  if (kStream) stream_fence();

  if (!has_target) return;
  if (transform.capped) {
    const Tanh<double> tanh = rlk::tanh_with_slope(transform.inner_scale * u);
    u = tanh.value;
    tanh_slope = tanh.slope;
  }
  const T target_gradient = static_cast<T>(gradient.target(transform.k * (u - m)) * tanh_slope);
  if (dtarget) {
    static_cast<T*>(dtarget)[row] = target_gradient;
    out[y] = Elem{};
  } else {
    narrow(target_gradient, out + y);
  }
}

// The same gradient from kept exponentials: 2^w is 2^(w_segment + shift), shift = k log2(e) (m_segment - m).
template <class Elem, bool kStream, class T>
void write_kept_gradient(const Elem* x, int64_t vocab, int64_t target, const RowTransform<T>& transform,
                         const RowCoefficients<T>& c, const KeptRow<T>& kept, Elem* out) {
  using V = typename VectorOf<Elem>::type;
  const RowGradient<double> gradient(c.dlogp, c.dentropy, c.dlse, c.entropy, c.log_sum_exp, transform.slope);
  const V k(transform.k_log2e), floor(Exp2Floor<T>::value);
  for (int64_t begin = 0; begin < vocab; begin += kSegment) {
    const int64_t end = vocab - begin < kSegment ? vocab : begin + kSegment;
    const T m = kept.maxima[begin / kSegment];
    const bool is_empty = m == -std::numeric_limits<T>::infinity();
    const double shift = is_empty ? 0.0 : double(transform.k_log2e) * (double(m) - c.row_max);
    const double factor = std::exp2(shift);
    const V a(static_cast<T>((gradient.a + gradient.b * shift) * factor)), b(static_cast<T>(gradient.b * factor));
    const V top(is_empty ? T(0) : m);
    const bool has_entropy = gradient.b != 0;
    const auto formed = [&](V e, V u) __attribute__((always_inline)) {
      return has_entropy ? e * fma(b, max_keep_second_nan(floor, k * (u - top)), a) : e * a;
    };
    const T* e = kept.exponentials.get();
    constexpr int kUnroll = 4;
    int64_t i = begin;
    for (; i + kUnroll * V::kLanes <= end; i += kUnroll * V::kLanes) {
      V logit[kUnroll];
      for (int j = 0; j < kUnroll; j += 2) load_pair(x + i + j * V::kLanes, logit + j);
      for (int j = 0; j < kUnroll; ++j) {
        put<V, kStream>(formed(V::load(e + i + j * V::kLanes), logit[j]), out + i + j * V::kLanes);
      }
    }
    for (; i + V::kLanes <= end; i += V::kLanes) put<V, kStream>(formed(V::load(e + i), V::load(x + i)), out + i);
    if (i < end) {
      Elem logits[V::kLanes] = {}, result[V::kLanes];
      T exponentials[V::kLanes] = {};
      std::memcpy(logits, x + i, (end - i) * sizeof(Elem));
      std::memcpy(exponentials, e + i, (end - i) * sizeof(T));
      formed(V::load(exponentials), V::load(logits)).store(result);
      std::memcpy(out + i, result, (end - i) * sizeof(Elem));
    }
  }
  if (kStream) stream_fence();
  const double d = transform.k * (double(widen(x[target])) - c.row_max);
  narrow(static_cast<T>(gradient.target(d)), out + target);
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

}  // namespace RLK_ISA
}  // namespace rlk
