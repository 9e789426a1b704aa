// Threads that share the tasks of one call: they spin briefly for the next call, then sleep.
#pragma once
#include <cstdint>

namespace coppice {

using Task = void (*)(const void* context, int64_t index);

// Runs task(context, i) for every i in [0, count), on the caller alone when another thread uses the
// workers. The caller finishes what no worker has begun, so that it never waits for a thread that
// has not been scheduled, nor, after a fork, for one that is gone.
void parallel(int64_t count, Task task, const void* context);

template <class F>
void parallel(int64_t count, const F& body) {
  parallel(
      count, [](const void* context, int64_t index) { (*static_cast<const F*>(context))(index); },
      &body);
}

int threads();
void set_threads(int count);

}  // namespace coppice
