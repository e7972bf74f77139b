// Threads that share the pieces of one job and sleep between jobs.
//
// A pool of our own, because libgomp keeps a team per calling thread and lets it spin: an update that runs in
// the background would take cores from the computation it hides behind.
#pragma once

#include <cstddef>
#include <functional>

namespace lightning_zero {

// Calls `piece(i)` once for every i in [0, count), on up to `threads` threads, the caller among them; returns
// when all calls have. `piece` must not throw. Callers on several threads take turns. In the child of a fork
// the pool starts anew.
void parallel_for(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece);

}  // namespace lightning_zero
