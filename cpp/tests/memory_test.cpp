// Calls for whose objects there is not enough memory: they throw and leave nothing behind.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "lightning_zero/disk.h"
#include "lightning_zero/disk_rings.h"
#include "lightning_zero/thread_pool.h"

namespace {

// The number of allocations of this thread that succeed, before all others fail; if negative, none fails.
thread_local long allocations_left = -1;

void* allocate(std::size_t bytes, std::size_t alignment) {
  const std::size_t rounded = std::max(bytes + alignment - 1, alignment) / alignment * alignment;
  void* const memory = allocations_left == 0 ? nullptr : std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
// Not inlined: GCC would warn that `free` does not match `new`.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace lightning_zero {
namespace {

// Runs `body` with 0, 1, 2, ... allocations, until it needs no more. Returns how often it has thrown.
template <class Body>
int with_too_little_memory(const Body& body) {
  int thrown = 0;
  for (long allocations = 0;; ++allocations) {
    allocations_left = allocations;
    try {
      body();
    } catch (const std::bad_alloc&) {
      ++thrown;
    }
    const bool enough = allocations_left > 0;
    allocations_left = -1;
    if (enough) return thrown;
  }
}

TEST(ThreadPoolMemoryTest, RunsAllPiecesOrNone) {
  constexpr std::size_t count = 40;
  int wrong = 0;
  const int thrown = with_too_little_memory([&] {
    std::array<std::atomic<int>, count> calls{};
    const auto made = [&](int times) {
      return std::all_of(calls.begin(), calls.end(), [=](const std::atomic<int>& of) { return of == times; });
    };
    try {
      parallel_for(count, 23, [&calls](std::size_t i) { ++calls[i]; });
    } catch (const std::bad_alloc&) {
      wrong += !made(0);
      throw;
    }
    wrong += !made(1);
  });
  EXPECT_GT(thrown, 0);
  EXPECT_EQ(wrong, 0);
}

constexpr std::size_t kPage = 4096;

class DiskMemoryTest : public ::testing::Test {
 protected:
  DiskMemoryTest() : file_(std::tmpfile()), written_(100 * kPage, 'w'), read_(100 * kPage) {}
  ~DiskMemoryTest() override { std::fclose(file_); }

  // Transfers with too little memory, which throw, and afterwards with enough.
  void expect_to_go_on(DiskPool& pool) {
    const Transfer out = {fileno(file_), written_.data(), written_.size(), 0};
    const Transfer in = {fileno(file_), read_.data(), read_.size(), 0};
    int failures = 0;
    EXPECT_GT(
        with_too_little_memory([&] { failures += pool.transfer(Direction::write, out, kPage).has_value(); }),
        0);
    failures += pool.transfer(Direction::read, in, kPage).has_value();
    EXPECT_EQ(failures, 0);
    EXPECT_EQ(read_, written_);
  }

  std::FILE* const file_;
  std::vector<char> written_, read_;
};

TEST_F(DiskMemoryTest, Threads) {
  with_too_little_memory([] { DiskThreads(5, kPage); });
  DiskThreads pool(2, kPage);
  expect_to_go_on(pool);
}

std::atomic<int> rings{0};  // number of rings that can still be made

std::unique_ptr<Ring> make_ring(std::size_t requests) {
  if (rings-- <= 0) throw std::system_error(EMFILE, std::system_category());
  return make_kernel_ring(requests);
}

TEST_F(DiskMemoryTest, Rings) {
  if (const std::string refusal = io_uring_refusal(); !refusal.empty()) GTEST_SKIP() << refusal;
  with_too_little_memory([] { DiskRings(2, kPage); });
  rings = 1;  // a ring that is lost would be waited for forever
  DiskRings pool(2, kPage, make_ring);
  expect_to_go_on(pool);
}

}  // namespace
}  // namespace lightning_zero
