// What the sanitizers have to be told of fibers; nothing without one. Only runtime.cpp includes this, and it is
// compiled without instrumentation: what the runtime itself reads and writes orders nothing.
#pragma once

#include <cstddef>

#ifdef RLK_SANITIZE_THREAD
#include <sanitizer/tsan_interface.h>
#endif
#ifdef RLK_SANITIZE_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace rlk {
namespace host_device {

#ifdef RLK_SANITIZE_THREAD

// Memory of a block must not be handed to the next one: its accesses are not ordered.
constexpr bool kKeepsSharedMemory = true;

using RaceThread = void*;
inline RaceThread new_race_thread() { return __tsan_create_fiber(0); }
inline void delete_race_thread(RaceThread thread) { __tsan_destroy_fiber(thread); }
inline RaceThread current_race_thread() { return __tsan_get_current_fiber(); }
inline void become(RaceThread thread) { __tsan_switch_to_fiber(thread, __tsan_switch_to_fiber_no_sync); }
inline void release(void* tag) { __tsan_release(tag); }
inline void acquire(void* tag) { __tsan_acquire(tag); }

#else

constexpr bool kKeepsSharedMemory = false;

struct RaceThread {};
inline RaceThread new_race_thread() { return {}; }
inline void delete_race_thread(RaceThread) {}
inline RaceThread current_race_thread() { return {}; }
inline void become(RaceThread) {}
inline void release(void*) {}
inline void acquire(void*) {}

#endif

#ifdef RLK_SANITIZE_ADDRESS

inline void leave_stack(void** saved, const void* bottom, size_t bytes) {
  __sanitizer_start_switch_fiber(saved, bottom, bytes);
}
inline void enter_stack(void* saved, const void** bottom, size_t* bytes) {
  __sanitizer_finish_switch_fiber(saved, bottom, bytes);
}
inline void forget_stack(void* bottom, size_t bytes) { __asan_unpoison_memory_region(bottom, bytes); }

#else

inline void leave_stack(void**, const void*, size_t) {}
inline void enter_stack(void*, const void**, size_t*) {}
inline void forget_stack(void*, size_t) {}

#endif

}  // namespace host_device
}  // namespace rlk
