// The threads that share the pieces of a job.
#include "lightning_zero/thread_pool.h"

#include <gtest/gtest.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "buffer.h"
#include "refusals.h"

namespace lightning_zero {
namespace {

// Counts without atomic operations, so that a piece that two threads run at once is a data race.
std::vector<int> calls_of_pieces(std::size_t count, std::size_t threads) {
  std::vector<int> calls(count);
  parallel_for(count, threads, [&](std::size_t i) { ++calls[i]; });
  return calls;
}

// A barrier that no thread passes until `count` threads have arrived.
class Barrier {
 public:
  explicit Barrier(std::size_t count) : missing_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) all_here_.notify_all();
    all_here_.wait(lock, [this] { return missing_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::size_t missing_;
};

// Runs one piece on each of `threads` threads, all at the same time.
void on_every_thread(std::size_t threads, const std::function<void(std::size_t)>& piece) {
  Barrier barrier(threads);
  parallel_for(threads, threads, [&](std::size_t i) {
    barrier.wait();
    piece(i);
  });
}

TEST(ThreadPoolTest, RunsEveryPieceOnce) {
  for (const std::size_t threads : {1, 2, 3, 8, 17, 5, 1, 0}) {
    for (const std::size_t count : {0, 1, 2, 3, 7, 16, 17, 18, 1000}) {
      const std::vector<int> calls = calls_of_pieces(count, threads);
      EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), static_cast<std::ptrdiff_t>(count))
          << count << " pieces, " << threads << " threads";
    }
  }
}

TEST(ThreadPoolTest, OneThreadIsTheCallerInOrder) {
  std::vector<std::size_t> order;
  parallel_for(5, 1, [&](std::size_t i) { order.push_back(i); });
  EXPECT_EQ(order, (std::vector<std::size_t>{0, 1, 2, 3, 4}));
}

TEST(ThreadPoolTest, UsesAsManyThreadsAsAskedFor) {
  constexpr std::size_t threads = 6;
  std::vector<std::thread::id> ids(threads);
  on_every_thread(threads, [&](std::size_t i) { ids[i] = std::this_thread::get_id(); });
  EXPECT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), threads);
  EXPECT_EQ(ids[0], std::this_thread::get_id());
}

TEST(ThreadPoolTest, PiecesMeetTheSameThreadsAgain) {
  constexpr std::size_t threads = 4;
  std::vector<std::thread::id> first(threads);
  on_every_thread(threads, [&](std::size_t i) { first[i] = std::this_thread::get_id(); });
  for (int job = 0; job < 20; ++job) {
    calls_of_pieces(13, 7);  // a job of another shape in between
    std::vector<std::thread::id> again(threads);
    on_every_thread(threads, [&](std::size_t i) { again[i] = std::this_thread::get_id(); });
    ASSERT_EQ(again, first);
  }
}

TEST(ThreadPoolTest, HelpsThreadsThatAreHeldUp) {
  // One piece waits for all others that its thread would run next, so that other threads must run these.
  constexpr int count = 40;
  std::atomic<int> done{0};
  parallel_for(count, 2, [&](std::size_t i) {
    if (i == 0) {
      while (done != count - 1) std::this_thread::yield();
    } else {
      ++done;
    }
  });
  EXPECT_EQ(done, count - 1);
}

TEST(ThreadPoolTest, RunsPiecesOnceThatAllThreadsReachFor) {
  // The first thread's pieces take longer than all others, so that all threads help and take pieces from its
  // part.
  constexpr std::size_t threads = 4;
  constexpr std::size_t count = 80000;
  std::vector<int> calls(count);
  parallel_for(count, threads, [&](std::size_t i) {
    ++calls[i];
    for (volatile int k = 0; i < count / threads && k < 20;) k = k + 1;
  });
  EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), static_cast<std::ptrdiff_t>(count));
}

TEST(ThreadPoolTest, StartsJobsQuicklyOneAfterTheOther) {
  // Workers wake up during jobs, after them, and during the next ones. The writes of a job must be visible
  // when it ends, and its closure does not exist any more then.
  for (int job = 0; job < 10000; ++job) {
    const std::size_t count = 2 + job % 16;
    std::size_t sum = 0;
    for (const int calls : calls_of_pieces(count, 1 + job % 17)) sum += calls;
    ASSERT_EQ(sum, count) << "job " << job;
  }
}

TEST(ThreadPoolTest, CallersShareTheWorkers) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&wrong, caller] {
      for (int job = 0; job < 200; ++job) {
        const std::size_t count = 1 + (job * 7 + caller) % 33;
        for (const int calls : calls_of_pieces(count, 1 + (job + caller) % 6)) wrong += calls != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

// A job in the background, two pieces of which run at a time until they are released.
class HeldJob {
 public:
  HeldJob() {
    caller_ = std::thread([this] {
      parallel_for(2, 2, [this](std::size_t) {
        ++started_;
        while (!stop_) std::this_thread::yield();
      });
      ended_ = true;
    });
    while (started_ != 2) std::this_thread::yield();
  }
  ~HeldJob() {
    stop_ = true;
    caller_.join();
  }
  bool ended() const { return ended_; }

 private:
  std::atomic<int> started_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> ended_{false};
  std::thread caller_;
};

TEST(ThreadPoolTest, ACallerDoesNotWaitForTheJobOfAnother) {
  const HeldJob held;
  for (const std::size_t threads : {2, 1, 4}) {
    const std::vector<int> calls = calls_of_pieces(50, threads);
    EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), 50);
  }
  EXPECT_FALSE(held.ended());
}

TEST(ThreadPoolTest, WorkersLeaveALongJobForANewOneAndComeBack) {
  constexpr std::size_t threads = 3;
  constexpr std::size_t count = 30000;  // pieces of 0.1 ms each, until the new job has ended
  std::atomic<bool> met{false};
  std::atomic<std::size_t> started{0};
  std::vector<int> calls(count);
  std::thread caller([&] {
    parallel_for(count, threads, [&](std::size_t i) {
      ++started;
      ++calls[i];
      if (!met) std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  });
  while (started < threads) std::this_thread::yield();
  on_every_thread(threads, [](std::size_t) {});  // makes all threads
  const std::size_t before = started;
  met = true;
  caller.join();
  EXPECT_LT(before, count);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), static_cast<std::ptrdiff_t>(count));
}

#ifdef __linux__
TEST(ThreadPoolTest, RunsWithTheThreadsThatThereAreWhereTheSystemGivesNoMore) {
  const bool able = with_refusals(kNoThreads, [] {
    const std::vector<int> calls = calls_of_pieces(1000, 500);
    EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), 1000);
  });
  if (!able) GTEST_SKIP() << "the system has no filters of calls";
  // Later it gives more again.
  std::atomic<int> calls{0};
  on_every_thread(30, [&](std::size_t) { ++calls; });
  EXPECT_EQ(calls, 30);
}
#endif

TEST(ThreadPoolTest, FillsWithZerosAndNothingElse) {
  constexpr std::size_t page = std::size_t{1} << 21;
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{63}, page - 1, page, 3 * page + 5}) {
    for (const std::size_t threads : {1, 3}) {
      Buffer memory(1, bytes, 1);
      std::memset(memory.data(), 0xFF, bytes);
      fill_with_zeros(memory.data(), bytes, threads);
      EXPECT_TRUE(std::all_of(memory.data(), memory.data() + bytes, [](unsigned char b) { return b == 0; }))
          << bytes << " bytes, " << threads << " threads";
    }
  }
  fill_with_zeros(nullptr, 0, 4);
}

#ifdef __linux__
std::vector<int> allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

class BindThreadsTest : public ::testing::Test {
 protected:
  ~BindThreadsTest() override { bind_threads({}); }
  const std::vector<int> allowed_ = allowed_cores();

  // The cores that thread i of `threads` may run on.
  static std::vector<std::vector<int>> cores_of_threads(std::size_t threads) {
    std::vector<std::vector<int>> cores(threads);
    on_every_thread(threads, [&](std::size_t i) { cores[i] = allowed_cores(); });
    return cores;
  }
};

TEST_F(BindThreadsTest, BindsAllButTheCaller) {
  const std::vector<int> bound = {allowed_.back(), allowed_.front()};
  bind_threads(bound);
  for (const std::size_t threads : {3, 6}) {  // the second job makes new threads
    const auto cores = cores_of_threads(threads);
    EXPECT_EQ(cores[0], allowed_);
    for (std::size_t k = 1; k < threads; ++k) EXPECT_EQ(cores[k], std::vector<int>{bound[(k - 1) % 2]}) << k;
  }
}

TEST_F(BindThreadsTest, TogetherEveryThreadGetsAllOfThem) {
  bind_threads(allowed_, true);
  for (const std::vector<int>& cores : cores_of_threads(4)) EXPECT_EQ(cores, allowed_);
  bind_threads({allowed_.back()}, true);
  const auto cores = cores_of_threads(4);
  EXPECT_EQ(cores[0], allowed_);
  for (std::size_t k = 1; k < 4; ++k) EXPECT_EQ(cores[k], std::vector<int>{allowed_.back()}) << k;
}

TEST_F(BindThreadsTest, WithoutCoresReleasesThem) {
  bind_threads({allowed_.front()});
  cores_of_threads(4);
  bind_threads({});
  for (const std::vector<int>& cores : cores_of_threads(4)) EXPECT_EQ(cores, allowed_);
}

TEST_F(BindThreadsTest, WithoutCoresTheyAreThoseOfTheProcess) {
  // Not those of a thread that makes or releases them, which may itself be bound to some of them.
  std::thread([&] {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(allowed_.back(), &own);
    ASSERT_EQ(sched_setaffinity(0, sizeof own, &own), 0);
    calls_of_pieces(4, 4);
    bind_threads({allowed_.front()});
    bind_threads({});
    const auto cores = cores_of_threads(4);
    EXPECT_EQ(cores[0], std::vector<int>{allowed_.back()});
    for (std::size_t k = 1; k < 4; ++k) EXPECT_EQ(cores[k], allowed_) << k;
  }).join();
}

TEST_F(BindThreadsTest, BindsWhereThereMayBeMoreCoresThanASetHolds) {
  // The system refuses sets without room for all cores that it may have.
  const std::vector<Refusal> refusals = {{SYS_sched_getaffinity, EINVAL, 1, sizeof(cpu_set_t)}};
  if (!with_refusals(refusals, [&] { bind_threads({allowed_.back()}); })) {
    GTEST_SKIP() << "the system has no filters of calls";
  }
  EXPECT_EQ(cores_of_threads(3)[2], std::vector<int>{allowed_.back()});
}

TEST_F(BindThreadsTest, RefusesCoresAndKeepsWhatWas) {
  bind_threads({allowed_.front()});
  for (const int core : {-1, CPU_SETSIZE, CPU_SETSIZE + 1000000}) {
    try {
      bind_threads({allowed_.back(), core});
      ADD_FAILURE() << "bound to core " << core;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("core " + std::to_string(core)), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(cores_of_threads(3)[2], std::vector<int>{allowed_.front()});
}

TEST_F(BindThreadsTest, RefusesCoresThatAreNotAllowed) {
  int missing = 0;
  while (missing < CPU_SETSIZE && std::count(allowed_.begin(), allowed_.end(), missing) > 0) ++missing;
  if (missing == CPU_SETSIZE) GTEST_SKIP() << "every core there can be is allowed";
  EXPECT_THROW(bind_threads({missing}), std::invalid_argument);
}
#endif

// The thread sanitizer ends a child that makes threads if its parent had several. Under the address
// sanitizer, a child may wait for ever for a lock of the sanitizer's allocator that another thread held at
// the fork.
#ifndef LIGHTNING_ZERO_SANITIZED

// The exit status of a child that runs `body`, or -1 if a signal ended it.
int in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // so that a child that hangs does not block the test
    // Not exit, which would run the functions that the parent has registered.
    _exit(body() ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool pool_works() {
  for (int job = 0; job < 50; ++job) {
    for (const int calls : calls_of_pieces(20, 4)) {
      if (calls != 1) return false;
    }
  }
  return true;
}

TEST(ForkTest, ChildHasAPoolOfItsOwn) {
  ASSERT_TRUE(pool_works());
  EXPECT_EQ(in_child(pool_works), 0);
  EXPECT_TRUE(pool_works());
}

TEST(ForkTest, ChildUsesThreadsOfItsOwn) {
  ASSERT_TRUE(pool_works());
  EXPECT_EQ(in_child([] {
              std::atomic<std::size_t> calls{0};
              on_every_thread(5, [&](std::size_t) { ++calls; });
              return calls == 5;
            }),
            0);
}

TEST(ForkTest, GrandchildHasAPoolOfItsOwn) {
  ASSERT_TRUE(pool_works());
  EXPECT_EQ(in_child([] { return pool_works() && in_child(pool_works) == 0; }), 0);
}

TEST(ForkTest, ChildIsNotHeldUpByAJobOfTheParent) {
  // The child is made while the parent's pool is busy and its locks are held.
  std::atomic<int> started{0};
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    parallel_for(3, 3, [&](std::size_t) {
      ++started;
      while (!stop) std::this_thread::yield();
    });
  });
  while (started != 3) std::this_thread::yield();
  EXPECT_EQ(in_child(pool_works), 0);
  stop = true;
  caller.join();
  EXPECT_TRUE(pool_works());
}

#endif

}  // namespace
}  // namespace lightning_zero
