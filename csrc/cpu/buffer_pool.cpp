#include "buffer_pool.h"

#include <cstdint>
#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif
#if __has_include(<pthread.h>)
#include <pthread.h>
#endif

namespace rlk {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

void* allocate(size_t bytes) {
  void* data = std::aligned_alloc(kHugePage, bytes);
#ifdef MADV_HUGEPAGE
  if (data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);  // where the system refuses, small pages do
#endif
  return data;
}

struct Block {
  void* data;
  size_t bytes;
};

class Pool {
 public:
  Pool() {
#if __has_include(<pthread.h>)
    // a child that was forked while another thread held the lock could never take it
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
#endif
  }

  // Never destroyed: a tensor may die after static objects have.
  static Pool& instance() {
    static Pool& pool = *new Pool;
    return pool;
  }

  // The smallest idle block that is large enough and at most a quarter too large.
  Block take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      if (block->bytes < bytes || block->bytes > bytes + bytes / 4) continue;
      if (best == idle_.end() || block->bytes < best->bytes) best = block;
    }
    if (best == idle_.end()) return {nullptr, 0};
    const Block block = *best;
    idle_.erase(best);
    idle_bytes_ -= block.bytes;
    return block;
  }

  // The blocks that have waited longest make room.
  void give(Block block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(block);
    idle_bytes_ += block.bytes;
    shrink(kIdleLimit);
  }

  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    shrink(0);
  }

  size_t idle_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return idle_bytes_;
  }

 private:
  void shrink(size_t limit) {
    while (idle_bytes_ > limit) {
      std::free(idle_.front().data);
      idle_bytes_ -= idle_.front().bytes;
      idle_.pop_front();
    }
  }

  std::mutex mutex_;
  std::list<Block> idle_;  // oldest first
  size_t idle_bytes_ = 0;
};

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes), capacity_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
  if (bytes > SIZE_MAX - kHugePage) throw std::bad_alloc();
  Block block = Pool::instance().take(capacity_);
  if (block.data == nullptr) block = {allocate(capacity_), capacity_};
  if (block.data == nullptr) {
    Pool::instance().clear();
    block.data = allocate(capacity_);
  }
  if (block.data == nullptr) throw std::bad_alloc();
  data_ = block.data;
  capacity_ = block.bytes;
}

Buffer::~Buffer() { Pool::instance().give({data_, capacity_}); }

size_t idle_bytes() { return Pool::instance().idle_bytes(); }

void free_idle_buffers() { Pool::instance().clear(); }

}  // namespace rlk
