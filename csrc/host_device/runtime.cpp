#include "runtime.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "sanitizers.h"

namespace rlk {
namespace host_device {
namespace {

constexpr int kLanes = 32;
constexpr int kMostThreads = 1024;
constexpr size_t kStackBytes = 256 << 10;  // pages that are not touched cost nothing

// A stack above a page that cannot be touched.
class Stack {
 public:
  Stack() : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    mapped_ = mmap(nullptr, guard_ + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped_, guard_, PROT_NONE);
    forget_stack(bottom(), kStackBytes);
  }
  ~Stack() { munmap(mapped_, guard_ + kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  void* bottom() const { return static_cast<char*>(mapped_) + guard_; }

 private:
  size_t guard_;
  void* mapped_;
};

enum class State { kReady, kAtBlockBarrier, kAtWarpOperation, kExited };

struct Fiber {
  Stack stack;
  ucontext_t context;
  RaceThread race_thread = new_race_thread();
  void* fake_stack = nullptr;
  int thread = 0;
  State state = State::kExited;
  // of the warp operation that it waits in
  WarpOperation operation = WarpOperation::kBarrier;
  unsigned mask = 0;
  uint64_t value = 0, result = 0;
  int source = 0;

  ~Fiber() { delete_race_thread(race_thread); }
};

const char* name_of(WarpOperation operation) {
  switch (operation) {
    case WarpOperation::kBarrier:
      return "__syncwarp";
    case WarpOperation::kShuffle:
      return "a shuffle";
    default:
      return "a vote";
  }
}

std::mutex launched_mutex;
std::vector<std::string> launched;
uint64_t schedule_seed = 0;

using Fibers = std::vector<std::unique_ptr<Fiber>>;

// Runs launches of one host thread.
class Device {
 public:
  void run(const char* kernel, int64_t blocks, int threads, size_t dynamic_bytes, const std::function<void()>& body);

  int thread() const { return current_->thread; }
  int64_t block() const { return block_; }
  int threads() const { return threads_; }
  void* dynamic_shared() const { return dynamic_shared_; }
  void* static_shared(const void* key, size_t bytes);
  void wait_for_block() { wait(State::kAtBlockBarrier); }
  uint64_t wait_for_lanes(WarpOperation operation, unsigned mask, uint64_t value, int source);

 private:
  static void enter_fiber();
  void run_block();
  void start(Fiber& fiber, int thread);
  void resume(Fiber& fiber);
  void wait(State state);
  void complete_warp_operations(int warp);
  bool complete_operation_of(const Fiber& fiber);
  bool release_block();
  void order_memory(const std::vector<Fiber*>& fibers);
  void shuffle_order(std::vector<int>* order);
  void* allocate(size_t bytes);
  void free_shared();
  [[noreturn]] void fail(const std::string& what);
  std::string waiting_threads() const;

  Fiber* fiber_at(int warp, int lane) {
    const int thread = warp * kLanes + lane;
    return thread < threads_ ? (*fibers_)[thread].get() : nullptr;
  }

  const char* kernel_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  int64_t block_ = 0;
  int threads_ = 0, live_ = 0;
  // neighbouring blocks run on different fibers, so that a race between the same threads of two blocks is seen
  Fibers pools_[2];
  Fibers* fibers_ = nullptr;
  Fiber* current_ = nullptr;
  ucontext_t scheduler_;
  RaceThread host_;
  void* host_fake_stack_ = nullptr;
  const void* host_stack_ = nullptr;
  size_t host_stack_bytes_ = 0;
  void* dynamic_shared_ = nullptr;
  std::vector<std::pair<const void*, void*>> static_shared_;
  std::vector<void*> allocations_;
  uint64_t random_ = 0;
  char launch_tag_ = 0, allocation_tag_ = 0, exit_tag_ = 0;
  char order_tags_[256] = {};  // an old one is used again after so many barriers
  unsigned next_order_tag_ = 0;
};

thread_local std::unique_ptr<Device> device;

void Device::fail(const std::string& what) {
  std::ostringstream message;
  message << kernel_ << ", block " << block_ << ": " << what;
  for (Fibers& pool : pools_) {
    for (const auto& fiber : pool) {
      become(fiber->race_thread);
      release(&exit_tag_);
    }
    become(host_);
    pool.clear();  // their threads stand in the middle of a function
  }
  acquire(&exit_tag_);
  free_shared();
  current_ = nullptr;
  throw std::runtime_error(message.str());
}

void* Device::allocate(size_t bytes) {
  const RaceThread caller = current_race_thread();
  become(host_);  // whose work comes before that of every thread
  void* memory = std::malloc(bytes);
  if (memory) {
    std::memset(memory, 0xff, bytes);
    allocations_.push_back(memory);
  }
  release(&allocation_tag_);
  become(caller);
  if (!memory) throw std::bad_alloc();
  return memory;
}

void Device::free_shared() {
  for (void* memory : allocations_) std::free(memory);
  allocations_.clear();
}

void* Device::static_shared(const void* key, size_t bytes) {
  const auto found = std::find_if(static_shared_.begin(), static_shared_.end(),
                                  [key](const auto& entry) { return entry.first == key; });
  if (found != static_shared_.end()) {
    acquire(&allocation_tag_);
    return found->second;
  }
  static_shared_.emplace_back(key, allocate(bytes));
  acquire(&allocation_tag_);
  return static_shared_.back().second;
}

void Device::shuffle_order(std::vector<int>* order) {
  if (schedule_seed < 2) return;
  for (size_t i = order->size(); i > 1; --i) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    std::swap((*order)[i - 1], (*order)[random_ % i]);
  }
}

void Device::enter_fiber() {
  Device& self = *device;
  enter_stack(nullptr, &self.host_stack_, &self.host_stack_bytes_);
  acquire(&self.launch_tag_);
  acquire(&self.allocation_tag_);
  (*self.body_)();
  release(&self.exit_tag_);
  self.current_->state = State::kExited;
  become(self.host_);
  leave_stack(nullptr, self.host_stack_, self.host_stack_bytes_);
  setcontext(&self.scheduler_);
}

void Device::start(Fiber& fiber, int thread) {
  fiber.thread = thread;
  fiber.state = State::kReady;
  fiber.fake_stack = nullptr;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.bottom();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &Device::enter_fiber, 0);
}

void Device::resume(Fiber& fiber) {
  current_ = &fiber;
  leave_stack(&host_fake_stack_, fiber.stack.bottom(), kStackBytes);
  become(fiber.race_thread);
  swapcontext(&scheduler_, &fiber.context);
  enter_stack(host_fake_stack_, nullptr, nullptr);
  current_ = nullptr;
}

void Device::wait(State state) {
  Fiber& fiber = *current_;
  fiber.state = state;
  become(host_);
  leave_stack(&fiber.fake_stack, host_stack_, host_stack_bytes_);
  swapcontext(&fiber.context, &scheduler_);
  enter_stack(fiber.fake_stack, &host_stack_, &host_stack_bytes_);
}

uint64_t Device::wait_for_lanes(WarpOperation operation, unsigned mask, uint64_t value, int source) {
  Fiber& fiber = *current_;
  fiber.operation = operation;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  wait(State::kAtWarpOperation);
  return fiber.result;
}

// Everything that these threads did comes before everything that any of them does from here on.
void Device::order_memory(const std::vector<Fiber*>& fibers) {
  char* tag = &order_tags_[next_order_tag_++ % sizeof order_tags_];
  for (Fiber* fiber : fibers) {
    become(fiber->race_thread);
    release(tag);
  }
  for (Fiber* fiber : fibers) {
    become(fiber->race_thread);
    acquire(tag);
  }
  become(host_);
}

bool Device::complete_operation_of(const Fiber& waiting) {
  if (!(waiting.mask >> (waiting.thread % kLanes) & 1)) {
    fail("thread " + std::to_string(waiting.thread) + " calls " + name_of(waiting.operation) +
         " with a mask of other lanes");
  }
  std::vector<Fiber*> lanes;
  unsigned ballot = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    Fiber* fiber = fiber_at(waiting.thread / kLanes, lane);
    if (!(waiting.mask >> lane & 1) || !fiber || fiber->state == State::kExited) continue;
    if (fiber->state != State::kAtWarpOperation || fiber->operation != waiting.operation ||
        fiber->mask != waiting.mask) {
      return false;
    }
    lanes.push_back(fiber);
    ballot |= static_cast<unsigned>(fiber->value & 1) << lane;
  }
  for (Fiber* fiber : lanes) {
    fiber->state = State::kReady;
    if (fiber->operation == WarpOperation::kBallot) fiber->result = ballot;
    if (fiber->operation == WarpOperation::kShuffle) {
      const Fiber* source = fiber_at(fiber->thread / kLanes, fiber->source);
      const bool takes_part = std::find(lanes.begin(), lanes.end(), source) != lanes.end();
      fiber->result = takes_part ? source->value : ~uint64_t{0};
    }
  }
  order_memory(lanes);
  return true;
}

void Device::complete_warp_operations(int warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const Fiber* fiber = fiber_at(warp, lane);
    if (fiber && fiber->state == State::kAtWarpOperation && complete_operation_of(*fiber)) return;
  }
}

bool Device::release_block() {
  std::vector<Fiber*> waiting;
  for (int thread = 0; thread < threads_; ++thread) {
    Fiber& fiber = *(*fibers_)[thread];
    if (fiber.state == State::kAtBlockBarrier) waiting.push_back(&fiber);
  }
  if (waiting.empty() || static_cast<int>(waiting.size()) != live_) return false;
  for (Fiber* fiber : waiting) fiber->state = State::kReady;
  order_memory(waiting);
  return true;
}

std::string Device::waiting_threads() const {
  std::ostringstream message;
  message << "deadlock: ";
  int named = 0;
  for (int thread = 0; thread < threads_; ++thread) {
    const Fiber& fiber = *(*fibers_)[thread];
    if (fiber.state == State::kExited) continue;
    const Fiber* before = thread > 0 ? (*fibers_)[thread - 1].get() : nullptr;
    if (before && before->state == fiber.state && before->operation == fiber.operation && before->mask == fiber.mask) {
      continue;  // named with its neighbour
    }
    if (++named > 8) break;
    message << (named > 1 ? "; " : "") << "from thread " << thread << " on ";
    if (fiber.state == State::kAtBlockBarrier) {
      message << "at __syncthreads, waiting for the block";
    } else {
      message << "at " << name_of(fiber.operation) << ", waiting for lanes 0x" << std::hex << fiber.mask << std::dec;
    }
  }
  return message.str();
}

void Device::run_block() {
  std::vector<int> order(threads_);
  std::iota(order.begin(), order.end(), 0);
  if (schedule_seed == 1) std::reverse(order.begin(), order.end());
  for (int thread = 0; thread < threads_; ++thread) start(*(*fibers_)[thread], thread);
  live_ = threads_;
  while (live_ > 0) {
    bool someone_ran = false;
    shuffle_order(&order);
    for (int thread : order) {
      Fiber& fiber = *(*fibers_)[thread];
      if (fiber.state != State::kReady) continue;
      someone_ran = true;
      resume(fiber);
      if (fiber.state == State::kExited) {
        --live_;
        complete_warp_operations(thread / kLanes);
      } else if (fiber.state == State::kAtWarpOperation) {
        complete_operation_of(fiber);
      }
    }
    if (!release_block() && !someone_ran) fail(waiting_threads());
  }
}

void Device::run(const char* kernel, int64_t blocks, int threads, size_t dynamic_bytes,
                 const std::function<void()>& body) {
  kernel_ = kernel;
  body_ = &body;
  threads_ = threads;
  block_ = 0;
  host_ = current_race_thread();
  if (threads < 1 || threads > kMostThreads) fail("expected 1 to 1024 threads a block, got " + std::to_string(threads));
  random_ = schedule_seed;
  release(&launch_tag_);
  for (Fibers& pool : pools_) {
    while (static_cast<int>(pool.size()) < threads) pool.push_back(std::make_unique<Fiber>());
  }
  for (int64_t i = 0; i < blocks; ++i) {
    block_ = schedule_seed == 1 ? blocks - 1 - i : i;
    fibers_ = &pools_[block_ % 2];
    static_shared_.clear();
    dynamic_shared_ = dynamic_bytes > 0 ? allocate(dynamic_bytes) : nullptr;
    run_block();
    if (!kKeepsSharedMemory) free_shared();
  }
  acquire(&exit_tag_);
  free_shared();
}

}  // namespace

void run(const char* kernel, int64_t blocks, int threads, size_t dynamic_bytes, const std::function<void()>& body) {
  {
    const std::lock_guard<std::mutex> lock(launched_mutex);
    if (blocks > 0 && std::find(launched.begin(), launched.end(), kernel) == launched.end()) {
      launched.emplace_back(kernel);
    }
  }
  if (!device) device = std::make_unique<Device>();
  device->run(kernel, blocks, threads, dynamic_bytes, body);
}

std::vector<std::string> launched_kernels() {
  const std::lock_guard<std::mutex> lock(launched_mutex);
  return launched;
}

void set_schedule(uint64_t seed) { schedule_seed = seed; }

int thread_index() { return device->thread(); }
int64_t block_index() { return device->block(); }
int block_size() { return device->threads(); }
void* static_shared(const void* key, size_t bytes) { return device->static_shared(key, bytes); }
void* dynamic_shared() { return device->dynamic_shared(); }
void block_barrier() { device->wait_for_block(); }
uint64_t warp_operation(WarpOperation operation, unsigned mask, uint64_t value, int source) {
  return device->wait_for_lanes(operation, mask, value, source);
}

}  // namespace host_device
}  // namespace rlk
