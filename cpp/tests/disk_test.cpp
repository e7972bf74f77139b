// Transfers between memory and files, by the system's calls and by scripted ones that transfer too little,
// refuse or fail.
#include "lightning_zero/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>
#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lightning_zero/disk_rings.h"
#include "refusals.h"

namespace lightning_zero {
namespace {

constexpr std::size_t kPage = 4096;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory aligned_memory(std::size_t bytes) {
  return Memory(static_cast<char*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage)));
}

Memory random_memory(std::size_t bytes, unsigned seed) {
  Memory memory = aligned_memory(bytes);
  std::mt19937 random(seed);
  for (std::size_t i = 0; i < bytes; ++i) memory.get()[i] = static_cast<char>(random());
  return memory;
}

class File {
 public:
  File() : stream_(std::tmpfile()) {}
  ~File() { std::fclose(stream_); }
  int descriptor() const { return fileno(stream_); }

 private:
  std::FILE* stream_;
};

// The behavior of the calls below; each test sets it.
struct Script {
  std::atomic<int> calls{0};
  std::atomic<int> pauses{0};
  int error = 0;                // the error of the next `errors` calls
  std::atomic<int> errors{0};   // number of calls that will still fail
  std::size_t most = SIZE_MAX;  // maximum number of bytes of one call
  off_t bad_offset = -1;        // a call that includes this offset fails with `error`
  int submit_error = 0;         // the error of a ring's next `submit_errors` submissions
  std::atomic<int> submit_errors{0};
  std::size_t needed_under_way = 0;  // number of requests under way before such an error
  std::atomic<int> rings{1 << 30};   // number of rings that can still be made
  std::atomic<bool> held{false};     // submissions do not return before a ring is refused
};
Script* script = nullptr;

bool fails(off_t offset, std::size_t bytes) {
  ++script->calls;
  if (script->bad_offset >= 0) {
    return offset <= script->bad_offset && script->bad_offset < offset + static_cast<off_t>(bytes);
  }
  return script->errors-- > 0;
}

ssize_t scripted_read(int file, void* memory, std::size_t bytes, off_t offset) {
  if (fails(offset, bytes)) return errno = script->error, -1;
  return ::pread(file, memory, std::min(bytes, script->most), offset);
}

ssize_t scripted_write(int file, const void* memory, std::size_t bytes, off_t offset) {
  if (fails(offset, bytes)) return errno = script->error, -1;
  return ::pwrite(file, memory, std::min(bytes, script->most), offset);
}

constexpr DiskCalls kScripted = {scripted_read, scripted_write, [] { ++script->pauses; }};

// A ring with a scripted kernel: it takes some of the queued requests, and ends some of these in reverse
// order.
class ScriptedRing : public Ring {
 public:
  explicit ScriptedRing(std::size_t requests) : room_(requests) {}
  ~ScriptedRing() override { EXPECT_EQ(pushed_.size() + under_way_.size(), 0U) << "requests are under way"; }

  void push(Direction direction, const Transfer& transfer, std::size_t tag) override {
    pushed_.push_back({direction, transfer, tag});
    ASSERT_LE(pushed_.size() + under_way_.size(), room_);
  }

  int submit() override {
    while (script->held) std::this_thread::yield();
    if (under_way_.size() >= script->needed_under_way && script->submit_errors-- > 0) {
      broken_ = script->submit_error == EBADF;
      return -script->submit_error;
    }
    const std::size_t taken = std::min(pushed_.size(), std::size_t{2});
    under_way_.insert(under_way_.end(), pushed_.begin(), pushed_.begin() + static_cast<long>(taken));
    pushed_.erase(pushed_.begin(), pushed_.begin() + static_cast<long>(taken));
    ready_ = pushed_.empty();
    return static_cast<int>(taken);
  }

  bool pop(Completion* completion) override {
    if (under_way_.empty() || !(broken_ || std::exchange(ready_, false))) return false;
    const Request request = under_way_.back();
    under_way_.pop_back();
    const Transfer& part = request.transfer;
    const auto offset = static_cast<off_t>(part.offset);
    const ssize_t result = request.direction == Direction::read
                               ? scripted_read(part.file, part.memory, part.bytes, offset)
                               : scripted_write(part.file, part.memory, part.bytes, offset);
    *completion = {request.tag, result < 0 ? -errno : result};
    return true;
  }

  void withdraw() override { pushed_.clear(); }

 private:
  struct Request {
    Direction direction;
    Transfer transfer;
    std::size_t tag;
  };

  const std::size_t room_;
  std::vector<Request> pushed_;
  std::vector<Request> under_way_;
  bool ready_ = false;
  bool broken_ = false;
};

std::unique_ptr<Ring> make_scripted_ring(std::size_t requests) {
  if (script->rings-- <= 0) {
    script->held = false;
    throw std::system_error(EMFILE, std::system_category(), "scripted");
  }
  return std::make_unique<ScriptedRing>(requests);
}

// A function that makes a pool for `depth` blocks at a time, of `block` bytes.
using MakePool = std::unique_ptr<DiskPool> (*)(std::size_t depth, std::size_t block);

std::unique_ptr<DiskPool> threads(std::size_t depth, std::size_t block) {
  return std::make_unique<DiskThreads>(depth, block);
}
std::unique_ptr<DiskPool> rings(std::size_t depth, std::size_t block) {
  return std::make_unique<DiskRings>(depth, block);
}
std::unique_ptr<DiskPool> scripted_threads(std::size_t depth, std::size_t block) {
  return std::make_unique<DiskThreads>(depth, block, kScripted);
}
std::unique_ptr<DiskPool> scripted_rings(std::size_t depth, std::size_t block) {
  return std::make_unique<DiskRings>(depth, block, make_scripted_ring, kScripted.pause);
}

class DiskTest : public ::testing::TestWithParam<MakePool> {
 protected:
  DiskTest() { script = &script_; }
  void SetUp() override {
    const std::string refusal = io_uring_refusal();
    if (GetParam() == rings && !refusal.empty()) GTEST_SKIP() << refusal;
  }

  static std::unique_ptr<DiskPool> pool(std::size_t depth, std::size_t block) {
    return GetParam()(depth, block);
  }

  // Writes `bytes` random bytes and reads them back.
  void expect_round_trip(DiskPool& pool, std::size_t bytes, std::uint64_t offset, std::size_t alignment) {
    const Memory written = random_memory(bytes, 1);
    const Memory read = aligned_memory(bytes);
    ASSERT_FALSE(
        pool.transfer(Direction::write, {file_.descriptor(), written.get(), bytes, offset}, alignment));
    ASSERT_FALSE(pool.transfer(Direction::read, {file_.descriptor(), read.get(), bytes, offset}, alignment));
    EXPECT_EQ(std::memcmp(written.get(), read.get(), bytes), 0);
  }

  Script script_;
  File file_;
};

// Scripted faults below either backend.
class DiskFaultTest : public DiskTest {};

// Cases that concern rings only.
class DiskRingsTest : public DiskTest {};

std::string name_of(const ::testing::TestParamInfo<MakePool>& info) {
  return info.param == threads || info.param == scripted_threads ? "threads" : "rings";
}

INSTANTIATE_TEST_SUITE_P(, DiskTest, ::testing::Values(threads, rings), name_of);
INSTANTIATE_TEST_SUITE_P(, DiskFaultTest, ::testing::Values(scripted_threads, scripted_rings), name_of);
INSTANTIATE_TEST_SUITE_P(, DiskRingsTest, ::testing::Values(scripted_rings), name_of);

TEST_P(DiskTest, ReadsWhatWasWritten) {
  for (const std::size_t depth : {1, 5}) {
    const auto pool = this->pool(depth, 2 * kPage);
    for (const std::size_t bytes : {std::size_t{1}, kPage, 2 * kPage + 1, 9 * kPage + 7}) {
      expect_round_trip(*pool, bytes, 12345, 1);
    }
    EXPECT_FALSE(pool->transfer(Direction::read, {}, 1));
    EXPECT_FALSE(pool->transfer(Direction::write, {file_.descriptor(), nullptr, 0, 0}, 1));
  }
}

TEST_P(DiskFaultTest, ShortTransfersGoOnWhereTheyStopped) {
  const auto pool = this->pool(2, 4 * kPage);
  for (const std::size_t most : {std::size_t{1000}, kPage, kPage + 1}) {
    script_.most = most;
    expect_round_trip(*pool, 3 * kPage, 0, 1);
  }
  // With O_DIRECT it may continue only at a multiple of the alignment.
  script_.most = 2 * kPage + 100;
  script_.calls = 0;
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
  EXPECT_EQ(script_.calls, 4);
}

TEST_P(DiskFaultTest, TransfersThatAreInterruptedOrRefusedForNowAreTriedAgain) {
  const auto pool = this->pool(2, kPage);
  for (const int error : {EINTR, EAGAIN, ECANCELED}) {
    script_.error = error;
    script_.errors = 7;
    script_.pauses = 0;
    expect_round_trip(*pool, 4 * kPage, 0, kPage);
    EXPECT_EQ(script_.pauses, error == EINTR ? 0 : 7);
  }
}

TEST_P(DiskFaultTest, WhatIsAlwaysRefusedFailsInTheEnd) {
  const auto pool = this->pool(1, kPage);
  script_.error = EAGAIN;
  script_.errors = 1 << 30;
  const Memory memory = aligned_memory(kPage);
  const auto failure = pool->transfer(Direction::read, {file_.descriptor(), memory.get(), kPage, 0}, 1);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EAGAIN);
}

TEST_P(DiskFaultTest, AFailureSaysWhereAndLeavesOutTheRest) {
  script_.bad_offset = 5 * kPage + 9;
  for (const int error : {EIO, ENOSPC}) {
    script_.error = error;
    script_.calls = 0;
    const auto pool = this->pool(1, kPage);
    const Memory memory = random_memory(64 * kPage, 3);
    const auto failure =
        pool->transfer(Direction::write, {file_.descriptor(), memory.get(), 64 * kPage, 0}, kPage);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, error);
    EXPECT_EQ(failure->offset, 5 * kPage);
    EXPECT_EQ(script_.calls, 6);
    // The pool can still be used.
    EXPECT_FALSE(pool->transfer(Direction::write, {file_.descriptor(), memory.get(), 4 * kPage, 0}, kPage));
  }
}

TEST_P(DiskTest, TheEndOfAFileIsAFailureWithoutACode) {
  for (const std::size_t alignment : {std::size_t{1}, kPage}) {
    const auto pool = this->pool(2, 4 * kPage);
    const Memory memory = random_memory(3 * kPage, 4);
    ASSERT_EQ(ftruncate(file_.descriptor(), 0), 0);
    ASSERT_FALSE(pool->transfer(Direction::write, {file_.descriptor(), memory.get(), kPage + 100, 0}, 1));
    const auto failure =
        pool->transfer(Direction::read, {file_.descriptor(), memory.get(), 3 * kPage, 0}, alignment);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, 0);
    EXPECT_EQ(failure->offset, alignment == 1 ? kPage + 100 : kPage);
  }
}

TEST_P(DiskTest, WhatTheSystemRefusesIsReported) {
  const auto pool = this->pool(2, kPage);
  const Memory memory = random_memory(8 * kPage, 5);
  const auto failure_of = [&](Direction direction, int file) {
    const auto failure = pool->transfer(direction, {file, memory.get(), 8 * kPage, 0}, kPage);
    return failure ? failure->code : 0;
  };
  EXPECT_EQ(failure_of(Direction::read, -1), EBADF);
  const int full = ::open("/dev/full", O_WRONLY);
  EXPECT_EQ(failure_of(Direction::write, full), ENOSPC);
  ::close(full);
  expect_round_trip(*pool, 8 * kPage, 0, kPage);
}

TEST_P(DiskTest, ManyCallersShareThePool) {
  const auto pool = this->pool(3, kPage);
  constexpr std::size_t bytes = 6 * kPage;
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      const Memory written = random_memory(bytes, caller);
      const Memory read = aligned_memory(bytes);
      for (int turn = 0; turn < 20; ++turn) {
        const Transfer out{file_.descriptor(), written.get(), bytes, caller * bytes};
        const Transfer in{file_.descriptor(), read.get(), bytes, caller * bytes};
        wrong += pool->transfer(Direction::write, out, kPage).has_value();
        wrong += pool->transfer(Direction::read, in, kPage).has_value();
        wrong += std::memcmp(written.get(), read.get(), bytes) != 0;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(DiskRingsTest, SubmissionsThatAreInterruptedOrRefusedForNowAreTriedAgain) {
  const auto pool = this->pool(4, kPage);
  for (const int error : {EINTR, EAGAIN, EBUSY}) {
    script_.submit_error = error;
    script_.submit_errors = 7;
    script_.pauses = 0;
    expect_round_trip(*pool, 9 * kPage, 0, kPage);
    EXPECT_EQ(script_.pauses, error == EINTR ? 0 : 7);
  }
  script_.submit_error = EAGAIN;
  script_.submit_errors = 1 << 30;
  const Memory memory = aligned_memory(kPage);
  const auto failure = pool->transfer(Direction::read, {file_.descriptor(), memory.get(), kPage, 0}, kPage);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EAGAIN);
}

TEST_P(DiskRingsTest, ARingThatBreaksIsLeftWhenItsRequestsHaveEnded) {
  const auto pool = this->pool(4, kPage);
  const Memory memory = random_memory(9 * kPage, 6);
  script_.submit_error = EBADF;
  script_.needed_under_way = 2;  // and two more are queued
  script_.submit_errors = 1;
  script_.rings = 0;
  const Transfer transfer = {file_.descriptor(), memory.get(), 9 * kPage, 7 * kPage};
  auto failure = pool->transfer(Direction::write, transfer, kPage);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EBADF);
  EXPECT_EQ(failure->offset, 7 * kPage);
  EXPECT_EQ(script_.calls, 2);
  // The next call makes a ring, or reports why there is none.
  failure = pool->transfer(Direction::write, transfer, kPage);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EMFILE);
  script_.rings = 1;
  expect_round_trip(*pool, 9 * kPage, 0, kPage);
}

TEST_P(DiskRingsTest, CallersWaitForARingWhereTheSystemGivesNoMore) {
  script_.rings = 1;
  const auto pool = this->pool(2, kPage);
  script_.held = true;  // by the first caller, so that another one has to wait
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      const Memory memory = random_memory(4 * kPage, caller);
      for (int turn = 0; turn < 20; ++turn) {
        const Transfer out{file_.descriptor(), memory.get(), 4 * kPage, caller * 4 * kPage};
        wrong += pool->transfer(Direction::write, out, kPage).has_value();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  script_.rings = 0;
  EXPECT_THROW(this->pool(2, kPage), std::system_error);
}

#ifndef LIGHTNING_ZERO_SANITIZED  // see ForkTest

TEST_P(DiskTest, TheChildOfAForkMayLetGoOfThePoolAndMakesItsOwn) {
  auto pool = this->pool(3, kPage);
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
  const auto child = [&] {
    alarm(20);
    try {
      pool->transfer(Direction::read, {}, 1);
    } catch (const std::logic_error& error) {
      std::cerr << error.what();
    }
    pool.reset();
    pool = this->pool(3, kPage);
    expect_round_trip(*pool, 4 * kPage, 4 * kPage, kPage);
    std::exit(HasFailure() ? 1 : 7);
  };
  EXPECT_EXIT(child(), ::testing::ExitedWithCode(7), "cannot be used in the child of a fork; make a new one");
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
}

#endif

#ifdef __linux__

// What rings of the kernel take from the process.
struct Held {
  Held() {
    for (int file = 0; file < 1024; ++file) files += ::fcntl(file, F_GETFD) != -1;
    std::ifstream lines("/proc/self/maps");
    for (std::string line; std::getline(lines, line);) mappings += line.find("io_uring") != std::string::npos;
  }
  int files = 0;
  int mappings = 0;
};

void expect_nothing_more_held(const Held& before) {
  const Held now;
  EXPECT_EQ(now.files, before.files);
  EXPECT_EQ(now.mappings, before.mappings);
}

// Calls that the kernel itself refuses, to a thread: so that no fork is needed, and sanitizers see the tests.
class DiskRefusalTest : public DiskTest {
 protected:
  void SetUp() override {
    DiskTest::SetUp();
    if (!with_refusals({{kRingSetup, EPERM}}, [] {})) GTEST_SKIP() << "the system has no filters of calls";
  }

  std::optional<TransferFailure> write_a_page(DiskPool& pool) {
    const Memory memory = random_memory(kPage, 7);
    return pool.transfer(Direction::write, {file_.descriptor(), memory.get(), kPage, 3 * kPage}, kPage);
  }
};

class DiskRingsRefusalTest : public DiskRefusalTest {};
class DiskThreadsRefusalTest : public DiskRefusalTest {};

INSTANTIATE_TEST_SUITE_P(, DiskRingsRefusalTest, ::testing::Values(rings), name_of);
INSTANTIATE_TEST_SUITE_P(, DiskThreadsRefusalTest, ::testing::Values(threads), name_of);

TEST_P(DiskRingsRefusalTest, ARingThatIsRefusedIsReportedAndLeavesNothing) {
  const struct {
    Refusal refusal;
    int code;
    std::string call;
  } cases[] = {
      {{kRingSetup, EPERM}, EPERM, "io_uring_setup"},  // like the default of many containers
      {{kRingSetup, ENOSYS}, ENOSYS, "io_uring_setup"},
      {{kRingSetup, ENOMEM},
       ENOMEM,
       "io_uring_setup (before Linux 5.12 a ring counts towards RLIMIT_MEMLOCK)"},
      {{SYS_mmap, ENOMEM, 3, MAP_SHARED | MAP_POPULATE}, ENOMEM, "mmap of a ring"},
      {{SYS_mmap, EAGAIN, 5, 0x10000000}, EAGAIN, "mmap of a ring"},  // the second mapping, of the entries
      {{kRingEnter, EPERM}, EPERM, "io_uring_enter"},                 // a ring that cannot be used
      {{kRingEnter, EIO}, EIO, "io_uring_enter"},
      {{kRingEnter, 0}, ENOSYS, "io_uring_enter"},  // a ring that does nothing
  };
  const Held before;
  for (const auto& refused : cases) {
    ASSERT_TRUE(with_refusals({refused.refusal}, [&] {
      SCOPED_TRACE(refused.call);
      try {
        pool(2, kPage);
        ADD_FAILURE() << "was not refused";
      } catch (const std::system_error& error) {
        EXPECT_EQ(error.code().value(), refused.code);
        EXPECT_EQ(error.what(), refused.call + ": " + error.code().message());
        EXPECT_EQ(io_uring_refusal(), error.what());
      }
    }));
    expect_nothing_more_held(before);
  }
  EXPECT_EQ(io_uring_refusal(), "");
}

TEST_P(DiskRingsRefusalTest, AKernelWithoutTheFeaturesIsRefused) {
  // The call that does nothing reports no features, and returns 0, so it is descriptor 0 that has to be
  // closed.
  const int input = ::dup(0);
  ASSERT_EQ(::dup2(file_.descriptor(), 0), 0);
  std::string refusal;
  ASSERT_TRUE(with_refusals({{kRingSetup, 0}}, [&] { refusal = io_uring_refusal(); }));
  EXPECT_EQ(::fcntl(0, F_GETFD), -1);
  if (input >= 0) {
    ::dup2(input, 0);
    ::close(input);
  }
  EXPECT_EQ(refusal.find("io_uring of Linux before 5.6: "), 0U) << refusal;
}

TEST_P(DiskRingsRefusalTest, ATransferWhoseSubmissionsAreRefusedFails) {
  const Held before;
  for (const int error : {EPERM, EIO, EAGAIN, EBUSY, 0}) {
    DiskRings pool(2, kPage, make_kernel_ring, [] {});  // EAGAIN is tried again ten thousand times
    ASSERT_TRUE(with_refusals({{kRingEnter, error}}, [&] {
      const auto failure = write_a_page(pool);
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->code, error == 0 ? EIO : error);
      EXPECT_EQ(failure->offset, 3 * kPage);
    }));
    expect_nothing_more_held(before);  // the ring has been left
    expect_round_trip(pool, 5 * kPage, 0, kPage);
  }
}

std::function<void()> before_submit;  // of the rings below

// A ring of the kernel whose submissions are noticed.
class WatchedRing : public Ring {
 public:
  explicit WatchedRing(std::size_t requests) : ring_(make_kernel_ring(requests)) {}
  void push(Direction direction, const Transfer& transfer, std::size_t tag) override {
    ring_->push(direction, transfer, tag);
  }
  int submit() override {
    before_submit();
    return ring_->submit();
  }
  bool pop(Completion* completion) override { return ring_->pop(completion); }
  void withdraw() override { ring_->withdraw(); }

 private:
  const std::unique_ptr<Ring> ring_;
};

std::unique_ptr<Ring> make_watched_ring(std::size_t requests) {
  return std::make_unique<WatchedRing>(requests);
}

int pipe_ends[2];  // a request that reads from this pipe when it is empty is under way until the first pause

void write_to_pipe() {
  static const std::vector<char> page(kPage, 'x');
  EXPECT_EQ(::write(pipe_ends[1], page.data(), kPage), static_cast<ssize_t>(kPage));
}

TEST_P(DiskRingsRefusalTest, ATransferThatIsForbiddenOnTheWayWaitsForItsRequests) {
  ASSERT_EQ(::pipe(pipe_ends), 0);
  write_to_pipe();  // for the first of the two requests that are under way at a time
  ASSERT_FALSE(write_a_page(*pool(1, kPage)));  // so that there are four pages
  const Held before;
  {
    DiskRings pool(2, kPage, make_watched_ring, write_to_pipe);
    ASSERT_TRUE(with_refusals({}, [&] {
      int submissions = 0;
      before_submit = [&] {
        if (++submissions == 2) refuse({kRingEnter, EPERM});
      };
      const Memory memory = aligned_memory(4 * kPage);
      std::memset(memory.get(), 0, 4 * kPage);
      auto failure = pool.transfer(Direction::read, {pipe_ends[0], memory.get(), 4 * kPage, 0}, kPage);
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->code, EPERM);
      EXPECT_LE(failure->offset, kPage);  // either of the two requests may have come to the page
      EXPECT_EQ(submissions, 2);
      EXPECT_EQ(std::count(memory.get(), memory.get() + 4 * kPage, 'x'),
                static_cast<std::ptrdiff_t>(2 * kPage))
          << "the memory was given back while the kernel was to fill it";
      expect_nothing_more_held(before);
      // The next transfer reports why there is no ring.
      failure = pool.transfer(Direction::read, {file_.descriptor(), memory.get(), 4 * kPage, 0}, kPage);
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->code, EPERM);
      EXPECT_EQ(failure->offset, 0U);
    }));
    before_submit = [] {};
    expect_round_trip(pool, 4 * kPage, 0, kPage);  // by a thread to which nothing is refused
  }
  expect_nothing_more_held(before);
  for (const int end : pipe_ends) ::close(end);
}

TEST_P(DiskThreadsRefusalTest, APoolWithoutAnyThreadIsRefused) {
  ASSERT_TRUE(with_refusals(kNoThreads, [&] {
    try {
      pool(3, kPage);
      ADD_FAILURE() << "was not refused";
    } catch (const std::system_error& error) {
      EXPECT_EQ(error.code().value(), EAGAIN);
    }
  }));
}

#ifndef LIGHTNING_ZERO_SANITIZED  // sanitizers end a process that gets no memory

// A number of the kernel's description of this process.
long long number_of_process(const std::string& name) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.find(name + ":") == 0) return std::stoll(line.substr(name.size() + 1));
  }
  return -1;
}

TEST_P(DiskThreadsRefusalTest, APoolUsesTheThreadsThatThereCanBe) {
  // Threads are refused when the address space has no room for another stack.
  pthread_attr_t attributes;
  std::size_t stack = 0;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_getstacksize(&attributes, &stack), 0);
  pthread_attr_destroy(&attributes);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const long long threads_before = number_of_process("Threads");
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(number_of_process("VmSize")) * 1024 + 4 * stack;
  if (setrlimit(RLIMIT_AS, &tight) != 0) GTEST_SKIP() << "the address space is smaller already";
  std::unique_ptr<DiskPool> pool;
  EXPECT_NO_THROW(pool = this->pool(500, kPage));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  ASSERT_TRUE(pool);
  EXPECT_LT(number_of_process("Threads"), threads_before + 500);
  expect_round_trip(*pool, 50 * kPage, 0, kPage);
}

#endif

#endif

}  // namespace
}  // namespace lightning_zero
