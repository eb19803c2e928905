// A persistent pool of threads for loops of independent items.
#pragma once

#include <functional>

namespace kv {

// Run body(item) for item = 0..items-1 on the pool and the calling thread; returns when all have run. When another
// caller has the pool, the loop runs on the calling thread alone. `body` must not throw.
void parallel_for(int items, const std::function<void(int item)>& body);

// Threads a loop may use, the caller included: the affinity mask's count until it is set.
int thread_count();

// Set the number of threads, at least 1; waits for a running loop to end.
void set_thread_count(int count);

}  // namespace kv
