// What code compiled with -fsanitize=thread calls at each access, here to count bytes instead of finding races.
//
// A watched range has two counts per byte: loads and stores. Nothing else is recorded.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Watched {
  const char* begin;
  std::vector<uint8_t> loads, stores;
};
std::vector<Watched> ranges;

void access(const volatile void* address, size_t bytes, std::vector<uint8_t> Watched::* counts) {
  const char* begin = const_cast<const char*>(static_cast<const volatile char*>(address));
  for (Watched& range : ranges) {
    for (size_t i = 0; i < bytes; ++i) {
      const ptrdiff_t at = begin + i - range.begin;
      if (at >= 0 && at < static_cast<ptrdiff_t>(range.loads.size())) ++(range.*counts)[at];
    }
  }
}

}  // namespace

extern "C" {

#define COUNT(bytes)                                                                \
  void __tsan_read##bytes(void* p) { access(p, bytes, &Watched::loads); }           \
  void __tsan_write##bytes(void* p) { access(p, bytes, &Watched::stores); }         \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, &Watched::loads); } \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, &Watched::stores); }
COUNT(1)
COUNT(2)
COUNT(4)
COUNT(8)
COUNT(16)
void __tsan_read_range(void* p, size_t bytes) { access(p, bytes, &Watched::loads); }
void __tsan_write_range(void* p, size_t bytes) { access(p, bytes, &Watched::stores); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

void* __real_memcpy(void*, const void*, size_t);
void* __real_memset(void*, int, size_t);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, &Watched::loads);
  access(to, bytes, &Watched::stores);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  access(to, bytes, &Watched::stores);
  return __real_memset(to, value, bytes);
}

void watch(const void* begin, size_t bytes) {
  ranges.push_back({static_cast<const char*>(begin), std::vector<uint8_t>(bytes), std::vector<uint8_t>(bytes)});
}
// Counts of the i-th watched range are copied out, and watching ends with `forget`.
void counts(size_t i, uint8_t* loads, uint8_t* stores) {
  __real_memcpy(loads, ranges[i].loads.data(), ranges[i].loads.size());
  __real_memcpy(stores, ranges[i].stores.data(), ranges[i].stores.size());
}
void forget() { ranges.clear(); }
}
