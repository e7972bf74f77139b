#include "lightning_zero/thread_pool.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace lightning_zero {
namespace {

#ifdef __linux__
// A set of cores. A cpu_set_t ends at core 1023, so there may be several, one behind the other.
class CoreSet {
 public:
  // The cores that the process may run on: those of its first thread, since the calling thread may be bound
  // to some of them. Empty if the system does not say.
  static CoreSet of_process() {
    constexpr std::size_t kMost = 1024;
    for (std::size_t number = 1; number <= kMost; number *= 2) {
      CoreSet cores(number);
      if (sched_getaffinity(getpid(), cores.bytes(), cores.sets_.data()) == 0) return cores;
      if (errno != EINVAL) break;  // EINVAL: the system has more cores than the set
    }
    return CoreSet(1);
  }

  bool has(int core) const {
    return core >= 0 && CPU_ISSET_S(static_cast<std::size_t>(core), bytes(), sets_.data());
  }

  // The set of these cores, which are in this one.
  CoreSet only(const std::vector<int>& cores) const {
    CoreSet found(sets_.size());
    for (const int core : cores) CPU_SET_S(static_cast<std::size_t>(core), bytes(), found.sets_.data());
    return found;
  }

  // bind_threads has checked the cores; if one is not available any more, the thread is not bound.
  void bind_this_thread() const { pthread_setaffinity_np(pthread_self(), bytes(), sets_.data()); }

 private:
  explicit CoreSet(std::size_t number) : sets_(number) {}
  std::size_t bytes() const { return sets_.size() * sizeof(cpu_set_t); }

  std::vector<cpu_set_t> sets_;
};

// The cores of the k-th thread are those of binding[k % binding.size()].
using Binding = std::vector<CoreSet>;

// The binding of the last call of bind_threads; null before the first. Bindings are never freed, since a
// thread or the child of a fork may still read one.
std::atomic<const Binding*> told_binding{nullptr};
#endif

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
    } catch (const std::exception&) {  // a limit of the system, or no memory: use the existing threads
      return workers_ + 1;
    }
    return threads;
  }

  // The loop of a worker. Workers are never joined; they sleep when the process exits.
  void work(std::size_t thread) {
#ifdef __linux__
    const Binding* bound = nullptr;
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = newest_for(thread)) != nullptr; });
      const std::uint64_t seen = newest_;
      job->joined[thread] = true;
      ++job->busy;
#ifdef __linux__
      if (const Binding* const binding = told_binding; binding != bound) {
        bound = binding;
        (*binding)[(thread - 1) % binding->size()].bind_this_thread();
      }
#endif
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
  const CoreSet allowed = CoreSet::of_process();
  for (const int core : cores) {
    if (!allowed.has(core)) {
      throw std::invalid_argument("core " + std::to_string(core) +
                                  " is not one that this process may run on");
    }
  }
  Binding binding;
  if (cores.empty()) {
    binding.push_back(allowed);
  } else if (together) {
    binding.push_back(allowed.only(cores));
  } else {
    for (const int core : cores) binding.push_back(allowed.only({core}));
  }
  static std::mutex mutex;
  static auto* const told = new std::list<Binding>;  // all bindings so far: see told_binding
  const std::lock_guard<std::mutex> lock(mutex);
  told->push_back(std::move(binding));
  told_binding = &told->back();
#else
  static_cast<void>(together);
  if (!cores.empty()) throw std::runtime_error("threads cannot be bound to cores on this system");
#endif
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
