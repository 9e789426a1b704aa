// See pool.hpp. Each participant owns a contiguous range of the tasks and steals from the others'.
#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace coppice {
namespace {

constexpr int kMostThreads = 256;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr uint32_t kClosed = 0xffffffffu;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The next unclaimed task of a range, stamped with the call's number: a worker that comes late
// fails its compare-and-swap instead of taking a task of another call.
struct alignas(64) Range {
  std::atomic<uint64_t> ticket{kClosed};
};

class Pool {
 public:
  Pool() { set_threads(available()); }

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void set_threads(int count) {
    std::lock_guard<std::mutex> hold(callers_);
    count = std::clamp(count, 1, kMostThreads);
    for (; workers_ < count - 1; ++workers_) {
      std::thread([this, id = workers_ + 1] { work(id); }).detach();
    }
    threads_.store(count, std::memory_order_relaxed);
  }

  void run(int64_t count, Task task, const void* context) {
    const auto parts = static_cast<uint32_t>(std::min<int64_t>(threads(), count));
    if (parts < 2 || !callers_.try_lock()) {
      for (int64_t i = 0; i < count; ++i) task(context, i);
      return;
    }
    std::lock_guard<std::mutex> hold(callers_, std::adopt_lock);
    const uint32_t call = call_.load(std::memory_order_relaxed) + 1;
    publish(call, static_cast<uint32_t>(count), parts, task, context);
    take_part(call, 0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != count; ++spins) {
      // On a busy machine the worker that has the last task may be waiting for this very core.
      spins % 64 == 63 ? static_cast<void>(sched_yield()) : pause();
    }
    for (uint32_t i = 0; i < parts; ++i) {
      ranges_[i].ticket.store(uint64_t(call) << 32 | kClosed, std::memory_order_seq_cst);
    }
  }

  void forget_workers() { threads_.store(1, std::memory_order_relaxed); }

 private:
  static int available() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  }

  static uint32_t begin(uint32_t part, uint32_t count, uint32_t parts) {
    return static_cast<uint32_t>(uint64_t(count) * part / parts);
  }

  void publish(uint32_t call, uint32_t count, uint32_t parts, Task task, const void* context) {
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    parts_.store(parts, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    for (uint32_t i = 0; i < parts; ++i) {
      ranges_[i].ticket.store(uint64_t(call) << 32 | begin(i, count, parts),
                              std::memory_order_release);
    }
    call_.store(call, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> hold(sleep_); }
      wake_.notify_all();
    }
  }

  void take_part(uint32_t call, uint32_t id) {
    const Task task = task_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const uint32_t count = count_.load(std::memory_order_relaxed);
    const uint32_t parts = parts_.load(std::memory_order_relaxed);
    for (uint32_t i = 0; i < parts; ++i) {
      const uint32_t part = (id + i) % parts, end = begin(part + 1, count, parts);
      uint64_t ticket = ranges_[part].ticket.load(std::memory_order_acquire);
      while (ticket >> 32 == call && static_cast<uint32_t>(ticket) < end) {
        if (ranges_[part].ticket.compare_exchange_weak(ticket, ticket + 1,
                                                       std::memory_order_seq_cst)) {
          task(context, static_cast<uint32_t>(ticket));
          done_.fetch_add(1, std::memory_order_release);
          ticket = ranges_[part].ticket.load(std::memory_order_acquire);
        }
      }
    }
  }

  void work(int id) {
    uint32_t seen = 0;
    auto since = std::chrono::steady_clock::now();
    for (int spins = 1;; ++spins) {
      const uint32_t call = call_.load(std::memory_order_acquire);
      if (call != seen) {
        seen = call;
        if (static_cast<uint32_t>(id) < parts_.load(std::memory_order_relaxed)) {
          take_part(call, static_cast<uint32_t>(id));
          since = std::chrono::steady_clock::now();
        }
      } else if (spins % 64 != 0) {
        pause();
      } else if (std::chrono::steady_clock::now() - since < kSpin) {
        sched_yield();  // whoever has work goes first
      } else {
        sleep(seen);
        since = std::chrono::steady_clock::now();
      }
    }
  }

  void sleep(uint32_t seen) {
    std::unique_lock<std::mutex> hold(sleep_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(hold, [&] { return call_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  Range ranges_[kMostThreads];
  alignas(64) std::atomic<uint32_t> call_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> count_{0}, parts_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int> threads_{1};
  int workers_ = 0;  // started, guarded by callers_
  std::mutex callers_, sleep_;
  std::condition_variable wake_;
};

Pool& pool() {
  // Never destroyed: detached workers use it until the process is gone.
  static Pool* const instance = [] {
    Pool* made = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
    return made;
  }();
  return *instance;
}

}  // namespace

void parallel(int64_t count, Task task, const void* context) { pool().run(count, task, context); }
int threads() { return pool().threads(); }
void set_threads(int count) { pool().set_threads(count); }

}  // namespace coppice
