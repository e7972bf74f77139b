// Transfers between memory and files, by the system's calls and by scripted ones that transfer too little,
// refuse or fail.
#include "lightning_zero/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lightning_zero/disk_rings.h"

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
  if (script->rings-- <= 0) throw std::system_error(EMFILE, std::system_category(), "scripted");
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
        pool.transfer(Direction::write, {{file_.descriptor(), written.get(), bytes, offset}}, alignment));
    ASSERT_FALSE(
        pool.transfer(Direction::read, {{file_.descriptor(), read.get(), bytes, offset}}, alignment));
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
    EXPECT_FALSE(pool->transfer(Direction::write, {{file_.descriptor(), nullptr, 0, 0}}, 1));
  }
}

TEST_P(DiskTest, SeveralTransfersGoTogether) {
  const auto pool = this->pool(3, kPage);
  const Memory memory = random_memory(8 * kPage, 2);
  std::vector<Transfer> parts;
  for (std::size_t i = 0; i < 8; ++i) {  // in reverse order in the file
    parts.push_back({file_.descriptor(), memory.get() + i * kPage, kPage, (7 - i) * kPage});
  }
  ASSERT_FALSE(pool->transfer(Direction::write, parts, kPage));
  const Memory read = aligned_memory(8 * kPage);
  ASSERT_FALSE(pool->transfer(Direction::read, {{file_.descriptor(), read.get(), 8 * kPage, 0}}, kPage));
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(std::memcmp(read.get() + (7 - i) * kPage, memory.get() + i * kPage, kPage), 0) << i;
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
  const auto failure = pool->transfer(Direction::read, {{file_.descriptor(), memory.get(), kPage, 0}}, 1);
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
        pool->transfer(Direction::write, {{file_.descriptor(), memory.get(), 64 * kPage, 0}}, kPage);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, error);
    EXPECT_EQ(failure->file, file_.descriptor());
    EXPECT_EQ(failure->offset, 5 * kPage);
    EXPECT_EQ(script_.calls, 6);
    // The pool can still be used.
    EXPECT_FALSE(pool->transfer(Direction::write, {{file_.descriptor(), memory.get(), 4 * kPage, 0}}, kPage));
  }
}

TEST_P(DiskTest, TheEndOfAFileIsAFailureWithoutACode) {
  for (const std::size_t alignment : {std::size_t{1}, kPage}) {
    const auto pool = this->pool(2, 4 * kPage);
    const Memory memory = random_memory(3 * kPage, 4);
    ASSERT_EQ(ftruncate(file_.descriptor(), 0), 0);
    ASSERT_FALSE(pool->transfer(Direction::write, {{file_.descriptor(), memory.get(), kPage + 100, 0}}, 1));
    const auto failure =
        pool->transfer(Direction::read, {{file_.descriptor(), memory.get(), 3 * kPage, 0}}, alignment);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, 0);
    EXPECT_EQ(failure->offset, alignment == 1 ? kPage + 100 : kPage);
  }
}

TEST_P(DiskTest, WhatTheSystemRefusesIsReported) {
  const auto pool = this->pool(2, kPage);
  const Memory memory = random_memory(8 * kPage, 5);
  const auto failure_of = [&](Direction direction, int file) {
    const auto failure = pool->transfer(direction, {{file, memory.get(), 8 * kPage, 0}}, kPage);
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
        wrong += pool->transfer(Direction::write, {out}, kPage).has_value();
        wrong += pool->transfer(Direction::read, {in}, kPage).has_value();
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
  const auto failure = pool->transfer(Direction::read, {{file_.descriptor(), memory.get(), kPage, 0}}, kPage);
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
  const std::vector<Transfer> transfers = {{file_.descriptor(), memory.get(), 9 * kPage, 7 * kPage}};
  auto failure = pool->transfer(Direction::write, transfers, kPage);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EBADF);
  EXPECT_EQ(failure->offset, 7 * kPage);
  EXPECT_EQ(script_.calls, 2);
  // The next call makes a ring, or reports why there is none.
  failure = pool->transfer(Direction::write, transfers, kPage);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EMFILE);
  script_.rings = 1;
  expect_round_trip(*pool, 9 * kPage, 0, kPage);
}

TEST_P(DiskRingsTest, CallersWaitForARingWhereTheSystemGivesNoMore) {
  script_.rings = 1;
  const auto pool = this->pool(2, kPage);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      const Memory memory = random_memory(4 * kPage, caller);
      for (int turn = 0; turn < 20; ++turn) {
        const Transfer out{file_.descriptor(), memory.get(), 4 * kPage, caller * 4 * kPage};
        wrong += pool->transfer(Direction::write, {out}, kPage).has_value();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
  script_.rings = 0;
  EXPECT_THROW(this->pool(2, kPage), std::system_error);
}

#ifndef LIGHTNING_ZERO_SANITIZED  // see ForkTest

// The exit code of a child that exits with the result of `body`, or -1 if it does not exit.
template <class Body>
int in_child(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_P(DiskTest, TheChildOfAForkMayLetGoOfThePoolAndNotUseIt) {
  auto pool = this->pool(3, kPage);
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
  const auto body = [&] {
    bool refused = false;
    try {
      pool->transfer(Direction::read, {}, 1);
    } catch (const std::logic_error&) {
      refused = true;
    }
    pool.reset();
    return refused ? 7 : 1;
  };
  EXPECT_EQ(in_child(body), 7);
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
}

#ifdef __linux__
// Forbids a system call, like the default of many containers.
bool forbid(long call) {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {4, rules};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(DiskSandboxTest, ASandboxThatForbidsRingsIsNoticed) {
  if (!io_uring_refusal().empty()) GTEST_SKIP() << io_uring_refusal();
  for (const long call : {425, 426}) {  // io_uring_setup and io_uring_enter
    const int code = in_child([&] {
      if (!forbid(call)) return 7;
      const std::string refusal = io_uring_refusal();
      const bool named = refusal.find(call == 425 ? "io_uring_setup" : "io_uring_enter") == 0;
      return named && refusal.find("not permitted") != std::string::npos ? 7 : 1;
    });
    EXPECT_EQ(code, 7) << call;
  }
}
#endif

#endif

}  // namespace
}  // namespace lightning_zero
