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
#include <deque>
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

// What bind_threads was last told; null before. Never freed: a thread, or the child of a fork, may still read
// it.
std::atomic<const std::vector<int>*> bound_cores{nullptr};

class ThreadPool {
 public:
  void run(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece) {
    const std::lock_guard<std::mutex> turn(turn_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      threads_ = std::min(threads, count);
      try {
        for (; workers_ + 1 < threads_; ++workers_) {
          std::thread(&ThreadPool::work, this, workers_ + 1).detach();
        }
      } catch (const std::system_error&) {  // a limit of the system: those that there are do the work
        threads_ = workers_ + 1;
      }
      while (parts_.size() < threads_) parts_.emplace_back();
      for (std::size_t t = 0; t < threads_; ++t) {
        parts_[t].next = count * t / threads_;
        parts_[t].stop = count * (t + 1) / threads_;
      }
      piece_ = &piece;
      open_ = true;
      ++job_;
    }
    wake_.notify_all();
    take_pieces(0);
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;  // who wakes up only now is not needed, and must not see a job that has ended
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  // A thread's part of the pieces, on a cache line of its own.
  struct alignas(64) Part {
    std::atomic<std::size_t> next{0};
    std::size_t stop = 0;
  };

  // What a worker does for the rest of the process: it is never joined, it sleeps when the process exits.
  void work(std::size_t thread) {
    std::uint64_t job = 0;
    const std::vector<int>* bound = nullptr;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return open_ && job_ != job && thread < threads_; });
      job = job_;
      ++busy_;
      if (const std::vector<int>* const cores = bound_cores; cores != bound) {
        bound = cores;
        bind_self(thread, *cores);
      }
      lock.unlock();
      take_pieces(thread);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void take_pieces(std::size_t thread) {
    for (std::size_t k = 0; k < threads_; ++k) {
      Part& part = parts_[(thread + k) % threads_];
      for (std::size_t i = part.next++; i < part.stop; i = part.next++) (*piece_)(i);
    }
  }

  void bind_self(std::size_t thread, const std::vector<int>& named) const {
#ifdef __linux__
    cpu_set_t cores = allowed_;
    if (!named.empty()) {
      CPU_ZERO(&cores);
      CPU_SET(named[(thread - 1) % named.size()], &cores);
    }
    // Checked in bind_threads; a core that has gone since then leaves the thread where it is.
    pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
#else
    static_cast<void>(thread);
    static_cast<void>(named);
#endif
  }

#ifdef __linux__
  const cpu_set_t allowed_ = allowed_cores();
#endif
  std::mutex turn_;   // held by the caller whose job it is
  std::mutex mutex_;  // guards what follows; a thread that has joined reads the job without it
  std::condition_variable wake_;
  std::condition_variable done_;
  std::size_t workers_ = 0;  // numbered from 1; the caller is thread 0
  std::size_t busy_ = 0;     // workers that have joined and not left
  bool open_ = false;        // whether workers may still join
  std::uint64_t job_ = 0;
  std::size_t threads_ = 0;
  std::deque<Part> parts_;
  const std::function<void(std::size_t)>* piece_ = nullptr;
};

// Never destroyed: sleeping workers use it until the process ends.
std::atomic<ThreadPool*> pool{nullptr};

ThreadPool* the_pool() {
  static const bool first = [] {
    pool = new ThreadPool;
    // A forked child has the memory of the pool and none of its threads.
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

void bind_threads(const std::vector<int>& cores) {
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
  static auto* const told = new std::list<std::vector<int>>;  // all there ever were: see bound_cores
  const std::lock_guard<std::mutex> lock(mutex);
  told->push_back(cores);
  bound_cores = &told->back();
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
