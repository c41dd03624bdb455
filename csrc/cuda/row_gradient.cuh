// The gradient of one row of logits, in chunks that are aligned where they are written.
#pragma once

#include "rows.cuh"

namespace rlk {
namespace cuda {

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
      const T dx = std::exp2(d) * std::fma(b, floored(d), a);
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
    T u = widen(row.data[kStrided ? y * row.stride : y]), tanh_slope = 1;
    if (kCanBeCapped && transform.capped) {
      const Tanh<T> tanh = tanh_with_slope(transform.inner_scale * u);
      u = tanh.value;
      tanh_slope = tanh.slope;
    }
    target_gradient = static_cast<T>(gradient.target(transform.k * (double(u) - m)) * tanh_slope);
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

}  // namespace cuda
}  // namespace rlk
