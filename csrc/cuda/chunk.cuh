// Sixteen bytes of elements, which is what a thread moves at a time, from wherever they start.
#pragma once

#include "../dtype.h"
#include "launch.h"

namespace rlk {
namespace cuda {

constexpr int kChunkBytes = 16;

struct Chunk {
  uint32_t words[4];
};

// As one access: a struct's members would be accessed one by one.
RLK_DEVICE Chunk load_aligned(const void* address) {
  const uint4 words = *static_cast<const uint4*>(address);
  return {{words.x, words.y, words.z, words.w}};
}
RLK_DEVICE void store_aligned(const Chunk& chunk, void* address) {
  *static_cast<uint4*>(address) = {chunk.words[0], chunk.words[1], chunk.words[2], chunk.words[3]};
}
// The compiler would take that apart where the words have just been computed.
RLK_DEVICE void store_to_global(const Chunk& chunk, void* address) {
  __stwb(static_cast<uint4*>(address), {chunk.words[0], chunk.words[1], chunk.words[2], chunk.words[3]});
}

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
  const char* const aligned = reinterpret_cast<const char*>(start) - shift;
  const Chunk left = load_aligned(aligned);
  return shift == 0 ? left : join<Elem>(left, load_aligned(aligned + kChunkBytes), shift);
}

}  // namespace cuda
}  // namespace rlk
