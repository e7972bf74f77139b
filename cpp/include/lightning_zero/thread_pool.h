// A pool of threads that share the pieces of a job and sleep between jobs.
//
// OpenMP is not used, because libgomp keeps a team of spinning threads for each calling thread: an update in
// the background would take cores from the computation that runs at the same time.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace lightning_zero {

// Calls `piece(i)` once for every i in [0, count), on up to `threads` threads including the caller's, and
// returns when all calls have returned. `piece` must neither throw nor call parallel_for. In the child of a
// fork a new pool is made.
//
// Several callers share the pool and never wait for each other: each runs pieces of its own job itself. The
// pool's threads switch to the newest job between two pieces of an older one, and return to that afterwards.
// So a norm that the training waits for is not delayed by an update in the background.
//
// Thread t of T begins with the t-th part of the pieces, in order, and helps the others afterwards. So the
// same threads work on arrays of the same shape, and memory stays near the thread that touched it first.
void parallel_for(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece);

// Binds the pool's k-th thread to the core cores[k % cores.size()] from its next job on or, if `together`,
// each thread to all these cores. Without cores, threads may run on all cores of the process. A caller's own
// thread is never bound. Throws std::invalid_argument for a core that the process may not run on, and
// std::runtime_error if the system cannot bind threads.
void bind_threads(const std::vector<int>& cores, bool together = false);

// Fills `bytes` bytes with zeros, each part by the thread that parallel_for assigns to it.
void fill_with_zeros(void* memory, std::size_t bytes, std::size_t threads);

}  // namespace lightning_zero
