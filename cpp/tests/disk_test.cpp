// Transfers between memory and files, by the system's calls and by others that come short, refuse and fail.
#include "lightning_zero/disk.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

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

// What the calls below do; each test sets it anew.
struct Script {
  std::atomic<int> calls{0};
  std::atomic<int> pauses{0};
  int error = 0;                // of every call `errors` times
  std::atomic<int> errors{0};   // that are still to come
  std::size_t most = SIZE_MAX;  // bytes of one call
  off_t bad_offset = -1;        // a call that touches it fails with `error`
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

class DiskTest : public ::testing::Test {
 protected:
  DiskTest() { script = &script_; }
  Script script_;
  File file_;

  // Writes `bytes` random ones and reads them back.
  void expect_round_trip(DiskPool& pool, std::size_t bytes, std::uint64_t offset, std::size_t alignment) {
    const Memory written = random_memory(bytes, 1);
    const Memory read = aligned_memory(bytes);
    ASSERT_FALSE(pool.write({{file_.descriptor(), written.get(), bytes, offset}}, alignment));
    ASSERT_FALSE(pool.read({{file_.descriptor(), read.get(), bytes, offset}}, alignment));
    EXPECT_EQ(std::memcmp(written.get(), read.get(), bytes), 0);
  }
};

TEST_F(DiskTest, ReadsWhatWasWritten) {
  for (const std::size_t threads : {1, 5}) {
    DiskPool pool(threads, 2 * kPage);
    for (const std::size_t bytes : {std::size_t{1}, kPage, 2 * kPage + 1, 9 * kPage + 7}) {
      expect_round_trip(pool, bytes, 12345, 1);
    }
    EXPECT_FALSE(pool.read({}, 1));
    EXPECT_FALSE(pool.write({{file_.descriptor(), nullptr, 0, 0}}, 1));
  }
}

TEST_F(DiskTest, SeveralTransfersGoTogether) {
  DiskPool pool(3, kPage);
  const Memory memory = random_memory(8 * kPage, 2);
  std::vector<Transfer> parts;
  for (std::size_t i = 0; i < 8; ++i) {  // backwards
    parts.push_back({file_.descriptor(), memory.get() + i * kPage, kPage, (7 - i) * kPage});
  }
  ASSERT_FALSE(pool.write(parts, kPage));
  const Memory read = aligned_memory(8 * kPage);
  ASSERT_FALSE(pool.read({{file_.descriptor(), read.get(), 8 * kPage, 0}}, kPage));
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(std::memcmp(read.get() + (7 - i) * kPage, memory.get() + i * kPage, kPage), 0) << i;
  }
}

TEST_F(DiskTest, ShortTransfersGoOnWhereTheyStopped) {
  DiskPool pool(2, 4 * kPage, kScripted);
  for (const std::size_t most : {std::size_t{1000}, kPage, kPage + 1}) {
    script_.most = most;
    expect_round_trip(pool, 3 * kPage, 0, 1);
  }
  // With O_DIRECT only from a border of a block on.
  script_.most = 2 * kPage + 100;
  script_.calls = 0;
  expect_round_trip(pool, 4 * kPage, 0, kPage);
  EXPECT_EQ(script_.calls, 4);
}

TEST_F(DiskTest, TransfersThatAreInterruptedOrRefusedForNowAreTriedAgain) {
  DiskPool pool(2, kPage, kScripted);
  for (const int error : {EINTR, EAGAIN}) {
    script_.error = error;
    script_.errors = 7;
    script_.pauses = 0;
    expect_round_trip(pool, 4 * kPage, 0, kPage);
    EXPECT_EQ(script_.pauses, error == EAGAIN ? 7 : 0);
  }
}

TEST_F(DiskTest, WhatIsAlwaysRefusedFailsInTheEnd) {
  DiskPool pool(1, kPage, kScripted);
  script_.error = EAGAIN;
  script_.errors = 1 << 30;
  const Memory memory = aligned_memory(kPage);
  const auto failure = pool.read({{file_.descriptor(), memory.get(), kPage, 0}}, 1);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EAGAIN);
}

TEST_F(DiskTest, AFailureSaysWhereAndLeavesOutTheRest) {
  script_.bad_offset = 5 * kPage + 9;
  for (const int error : {EIO, ENOSPC}) {
    script_.error = error;
    script_.calls = 0;
    DiskPool pool(1, kPage, kScripted);
    const Memory memory = random_memory(64 * kPage, 3);
    const auto failure = pool.write({{file_.descriptor(), memory.get(), 64 * kPage, 0}}, kPage);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, error);
    EXPECT_EQ(failure->file, file_.descriptor());
    EXPECT_EQ(failure->offset, 5 * kPage);
    EXPECT_EQ(script_.calls, 6);
    // The pool goes on.
    EXPECT_FALSE(pool.write({{file_.descriptor(), memory.get(), 4 * kPage, 0}}, kPage));
  }
}

TEST_F(DiskTest, TheEndOfAFileIsAFailureWithoutACode) {
  for (const std::size_t alignment : {std::size_t{1}, kPage}) {
    DiskPool pool(2, 4 * kPage);
    const Memory memory = random_memory(3 * kPage, 4);
    ASSERT_EQ(ftruncate(file_.descriptor(), 0), 0);
    ASSERT_FALSE(pool.write({{file_.descriptor(), memory.get(), kPage + 100, 0}}, 1));
    const auto failure = pool.read({{file_.descriptor(), memory.get(), 3 * kPage, 0}}, alignment);
    ASSERT_TRUE(failure);
    EXPECT_EQ(failure->code, 0);
    EXPECT_EQ(failure->offset, alignment == 1 ? kPage + 100 : kPage);
  }
}

TEST_F(DiskTest, ABadDescriptorIsReported) {
  DiskPool pool(2, kPage);
  const Memory memory = aligned_memory(kPage);
  const auto failure = pool.read({{-1, memory.get(), kPage, 0}}, 1);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code, EBADF);
}

TEST_F(DiskTest, ManyCallersShareThePool) {
  DiskPool pool(3, kPage);
  constexpr std::size_t bytes = 6 * kPage;
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      const Memory written = random_memory(bytes, caller);
      const Memory read = aligned_memory(bytes);
      for (int turn = 0; turn < 20; ++turn) {
        wrong += pool.write({{file_.descriptor(), written.get(), bytes, caller * bytes}}, kPage).has_value();
        wrong += pool.read({{file_.descriptor(), read.get(), bytes, caller * bytes}}, kPage).has_value();
        wrong += std::memcmp(written.get(), read.get(), bytes) != 0;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

#ifndef LIGHTNING_ZERO_SANITIZED  // see ForkTest
TEST_F(DiskTest, TheChildOfAForkMayLetGoOfThePool) {
  auto pool = std::make_unique<DiskPool>(3, kPage);
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    pool.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  expect_round_trip(*pool, 4 * kPage, 0, kPage);
}
#endif

}  // namespace
}  // namespace lightning_zero
