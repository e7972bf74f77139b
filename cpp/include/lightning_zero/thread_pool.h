// Threads that share the pieces of one job and sleep between jobs.
//
// A pool of our own, because libgomp keeps a team per calling thread and lets it spin: an update that runs in
// the background would take cores from the computation it hides behind.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace lightning_zero {

// Calls `piece(i)` once for every i in [0, count), on up to `threads` threads, the caller among them; returns
// when all calls have. `piece` must neither throw nor call parallel_for. In the child of a fork the pool
// starts anew.
//
// Callers on several threads share the threads and never wait for each other: each runs pieces of its own job
// itself, and the others go to the newest job, between two pieces of an older one, to which they come back.
// A norm that the training waits for is not held up by an update in the background.
//
// Thread t of T begins with the t-th part of the pieces, in order, and helps the others when it is done:
// arrays of one shape are always met by the same threads, so that memory lies near the thread that touched it
// first.
void parallel_for(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece);

// Binds the pool's k-th thread to the core cores[k % cores.size()] from its next job on, or `together`: every
// one to all of them; without cores, to all that the process may run on. A caller's own thread is never
// bound. Throws std::invalid_argument for a core that the process may not run on, std::runtime_error where
// the system cannot bind threads.
void bind_threads(const std::vector<int>& cores, bool together = false);

// Fills `bytes` bytes with zeros, each part by the thread that parallel_for gives it to.
void fill_with_zeros(void* memory, std::size_t bytes, std::size_t threads);

}  // namespace lightning_zero
