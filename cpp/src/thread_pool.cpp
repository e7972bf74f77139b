#include "lightning_zero/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace lightning_zero {
namespace {

class ThreadPool {
 public:
  void run(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& piece) {
    const std::lock_guard<std::mutex> turn(turn_);
    const std::size_t helpers = std::min(threads, count) - 1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (; workers_ < helpers; ++workers_) std::thread(&ThreadPool::work, this).detach();
      piece_ = &piece;
      count_ = count;
      next_ = 0;
      places_ = helpers;
    }
    wake_.notify_all();
    take_pieces();
    std::unique_lock<std::mutex> lock(mutex_);
    places_ = 0;  // who wakes up only now is not needed, and must not see a job that has ended
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  // What a worker does for the rest of the process: it is never joined, it sleeps when the process exits.
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return places_ > 0; });
      --places_;
      ++busy_;
      lock.unlock();
      take_pieces();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void take_pieces() {
    for (std::size_t i = next_++; i < count_; i = next_++) (*piece_)(i);
  }

  std::mutex turn_;   // held by the caller whose job it is
  std::mutex mutex_;  // guards what follows, except that `next_` is counted without it
  std::condition_variable wake_;
  std::condition_variable done_;
  std::size_t workers_ = 0;
  std::size_t places_ = 0;  // workers that may still join the job
  std::size_t busy_ = 0;    // workers that have joined and not left
  const std::function<void(std::size_t)>* piece_ = nullptr;
  std::size_t count_ = 0;
  std::atomic<std::size_t> next_{0};
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

}  // namespace lightning_zero
