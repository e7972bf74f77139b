#include "lightning_zero/thread_pool.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace lightning_zero {
namespace {

#ifdef __linux__
cpu_set_t allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  return allowed;
}
#endif

// The cores that threads are bound to: each thread to one core, or each to all of them.
struct Binding {
  std::vector<int> cores;
  bool together = false;
};

// The binding of the last call of bind_threads; null before the first. Bindings are never freed, since a
// thread or the child of a fork may still read one.
std::atomic<const Binding*> told_binding{nullptr};

// A thread's part of the pieces of a job; it has a cache line of its own.
struct alignas(64) Part {
  std::atomic<std::size_t> next{0};
  std::size_t stop = 0;
};

// The pieces of one call. The job lives on the caller's stack; the call ends when no thread works on the job.
struct Job {
  Job(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece)
      : piece(piece), parts(threads), joined(threads, false) {
    for (std::size_t t = 0; t < threads; ++t) {
      parts[t].next = count * t / threads;
      parts[t].stop = count * (t + 1) / threads;
    }
  }

  const std::function<void(std::size_t)>& piece;
  std::vector<Part> parts;
  std::vector<bool> joined;  // by thread: whether it works on the job or has found no pieces left
  std::size_t busy = 0;      // number of workers that have joined and not left
};

class ThreadPool {
 public:
  void run(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece) {
    Job job(count, hire(std::min(threads, count)), piece);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(&job);
      ++newest_;
    }
    wake_.notify_all();
    take_pieces(job, 0, std::numeric_limits<std::uint64_t>::max());
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.remove(&job);  // workers that wake up later are not needed, and must not see a job that has ended
    done_.wait(lock, [&job] { return job.busy == 0; });
  }

 private:
  // Makes workers so that there are `threads` threads including the caller's. Returns the number of threads,
  // which is smaller if the system allows no more.
  std::size_t hire(std::size_t threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      for (; workers_ + 1 < threads; ++workers_) {
        std::thread(&ThreadPool::work, this, workers_ + 1).detach();
      }
    } catch (const std::system_error&) {  // a limit of the system: use the existing threads
      return workers_ + 1;
    }
    return threads;
  }

  // The loop of a worker. Workers are never joined; they sleep when the process exits.
  void work(std::size_t thread) {
    const Binding* bound = nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = newest_for(thread)) != nullptr; });
      const std::uint64_t seen = newest_;
      job->joined[thread] = true;
      ++job->busy;
      if (const Binding* const binding = told_binding; binding != bound) {
        bound = binding;
        bind_self(thread, *binding);
      }
      lock.unlock();
      const bool finished = take_pieces(*job, thread, seen);
      lock.lock();
      // A worker that leaves for a newer job returns after that; the caller does not wait for it meanwhile.
      job->joined[thread] = finished;
      if (--job->busy == 0) done_.notify_all();
    }
  }

  // The newest job that the worker `thread` may join; null if there is none.
  Job* newest_for(std::size_t thread) const {
    const auto found = std::find_if(jobs_.rbegin(), jobs_.rend(), [thread](const Job* job) {
      return thread < job->joined.size() && !job->joined[thread];
    });
    return found == jobs_.rend() ? nullptr : *found;
  }

  // Runs pieces until none is left, then returns true, or until there is a newer job than the one last
  // `seen`, then returns false.
  bool take_pieces(Job& job, std::size_t thread, std::uint64_t seen) {
    const std::size_t threads = job.parts.size();
    for (std::size_t k = 0; k < threads; ++k) {
      Part& part = job.parts[(thread + k) % threads];
      for (std::size_t i = part.next++; i < part.stop; i = part.next++) {
        job.piece(i);
        if (newest_ > seen) return false;
      }
    }
    return true;
  }

  void bind_self(std::size_t thread, const Binding& binding) const {
#ifdef __linux__
    cpu_set_t cores = allowed_;
    if (const std::vector<int>& named = binding.cores; !named.empty()) {
      CPU_ZERO(&cores);
      if (binding.together) {
        for (const int core : named) CPU_SET(core, &cores);
      } else {
        CPU_SET(named[(thread - 1) % named.size()], &cores);
      }
    }
    // bind_threads has checked the cores; if one is not available any more, the thread is not bound.
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
#else
    static_cast<void>(thread);
    static_cast<void>(binding);
#endif
  }

#ifdef __linux__
  const cpu_set_t allowed_ = allowed_cores();
#endif
  std::mutex mutex_;  // guards the members below, and all of a job except its parts and its piece
  std::condition_variable wake_;
  std::condition_variable done_;
  std::size_t workers_ = 0;               // numbered from 1; a caller is thread 0 of its job
  std::list<Job*> jobs_;                  // the jobs of calls that have not ended, oldest first
  std::atomic<std::uint64_t> newest_{0};  // number of the newest job so far
};

// Never destroyed: sleeping workers use it until the process ends.
std::atomic<ThreadPool*> pool{nullptr};

ThreadPool* the_pool() {
  static const bool first = [] {
    pool = new ThreadPool;
    // A forked child has the memory of the pool but none of its threads, so it gets a new pool.
    pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });
    return true;
  }();
  static_cast<void>(first);
  return pool;
}

}  // namespace

void parallel_for(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece) {
  if (count <= 1 || threads <= 1) {
    for (std::size_t i = 0; i < count; ++i) piece(i);
    return;
  }
  the_pool()->run(count, threads, piece);
}

void bind_threads(const std::vector<int>& cores, bool together) {
#ifdef __linux__
  const cpu_set_t allowed = allowed_cores();
  for (const int core : cores) {
    if (core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &allowed)) {
      throw std::invalid_argument("core " + std::to_string(core) +
                                  " is not one that this process may run on");
    }
  }
#else
  if (!cores.empty()) throw std::runtime_error("threads cannot be bound to cores on this system");
#endif
  static std::mutex mutex;
  static auto* const told = new std::list<Binding>;  // all bindings so far: see told_binding
  const std::lock_guard<std::mutex> lock(mutex);
  told->push_back({cores, together});
  told_binding = &told->back();
}

void fill_with_zeros(void* memory, std::size_t bytes, std::size_t threads) {
  constexpr std::size_t kPage = std::size_t{1} << 21;
  auto* const first = static_cast<char*>(memory);
  parallel_for((bytes + kPage - 1) / kPage, threads, [&](std::size_t i) {
    const std::size_t start = i * kPage;
    std::memset(first + start, 0, std::min(kPage, bytes - start));
  });
}

}  // namespace lightning_zero
