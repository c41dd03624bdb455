// Sixteen bytes of elements, which is what a thread moves at a time, from wherever they start.
#pragma once

#include "../dtype.h"
#include "launch.h"

namespace rlk {
namespace cuda {

constexpr int kChunkBytes = 16;

struct alignas(kChunkBytes) Chunk {
  uint32_t words[4];
};

template <class Elem>
constexpr int kPerChunk = kChunkBytes / sizeof(Elem);

// Bytes past the last multiple of 16.
RLK_DEVICE int misalignment(const void* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % kChunkBytes);
}

template <class Elem>
RLK_DEVICE void unpack(const Chunk& chunk, Elem (&elements)[kPerChunk<Elem>]) {
  std::memcpy(elements, &chunk, sizeof chunk);
}

template <class Elem>
RLK_DEVICE Chunk pack(const Elem (&elements)[kPerChunk<Elem>]) {
  Chunk chunk;
  std::memcpy(&chunk, elements, sizeof chunk);
  return chunk;
}

// The sixteen bytes that start `shift` bytes into two neighbours.
template <class Elem>
RLK_DEVICE Chunk join(const Chunk& left, const Chunk& right, int shift) {
  uint32_t words[8];
  RLK_UNROLL
  for (int i = 0; i < 4; ++i) {
    words[i] = left.words[i];
    words[i + 4] = right.words[i];
  }
  if (shift & 8) {
    RLK_UNROLL
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if (shift & 4) {
    RLK_UNROLL
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  Chunk joined;
  RLK_UNROLL
  for (int i = 0; i < 4; ++i) joined.words[i] = words[i];
  if (sizeof(Elem) < sizeof(uint32_t)) {
    const int bits = shift % 4 * 8;
    RLK_UNROLL
    for (int i = 0; i < 4; ++i) {
      joined.words[i] = static_cast<uint32_t>((uint64_t{words[i + 1]} << 32 | words[i]) >> bits);
    }
  }
  return joined;
}

// Elements from `start` on, in aligned reads; `shift` is start's misalignment.
template <class Elem>
RLK_DEVICE Chunk load(const Elem* start, int shift) {
  const auto* aligned = reinterpret_cast<const Chunk*>(reinterpret_cast<const char*>(start) - shift);
  return shift == 0 ? aligned[0] : join<Elem>(aligned[0], aligned[1], shift);
}

template <class Elem>
RLK_DEVICE void store(const Chunk& chunk, Elem* aligned) {
  *reinterpret_cast<Chunk*>(aligned) = chunk;
}

}  // namespace cuda
}  // namespace rlk
