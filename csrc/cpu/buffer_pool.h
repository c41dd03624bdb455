// Large buffers in huge pages, handed out again instead of being faulted in anew.
//
// A fresh 155 MB buffer costs as much in page faults as several sweeps over it. Freed buffers therefore wait, up to
// kIdleLimit bytes of them, for the next one of about their size.
#pragma once

#include <cstddef>

namespace rlk {

constexpr size_t kIdleLimit = size_t{1} << 30;

class Buffer {
 public:
  explicit Buffer(size_t bytes);  // std::bad_alloc if there is no memory
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, capacity_;
  void* data_;
};

size_t idle_bytes();
void free_idle_buffers();

}  // namespace rlk
