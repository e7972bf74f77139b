// Signals between processes, and reads of another process's memory.
#include "lightning_zero/processes.h"

#include <gtest/gtest.h>

#ifdef __linux__

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

namespace lightning_zero {
namespace {

constexpr double kLong = 30.0, kShort = 0.01;  // seconds

TEST(Signal, WakesAWaiterInAnotherProcess) {
  SharedMemory memory(2 * sizeof(Signal));
  auto* there = static_cast<Signal*>(memory.data());  // zeros
  auto* back = there + 1;
  constexpr std::uint32_t kRounds = 200;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    for (std::uint32_t i = 1; i <= kRounds; ++i) {
      if (!there->wait(i, kLong)) _exit(1);
      back->announce(i);
    }
    _exit(0);
  }
  for (std::uint32_t i = 1; i <= kRounds; ++i) {
    EXPECT_FALSE(there->announce(i));
    ASSERT_TRUE(back->wait(i, kLong)) << i;
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Signal, GivesUpAfterItsTimeAndThenTellsThatItSleeps) {
  Signal signal;
  EXPECT_FALSE(signal.wait(1, kShort));
  EXPECT_FALSE(signal.wait(1, 0.0));
  EXPECT_TRUE(signal.sleep(1));
  EXPECT_TRUE(signal.announce(1));
  EXPECT_TRUE(signal.wait(1, 0.0));
  EXPECT_FALSE(signal.announce(2)) << "the waiter has been told of 1";
  EXPECT_FALSE(signal.sleep(2)) << "it has come";
  constexpr std::uint32_t kLargest = (1u << 31) - 1;
  EXPECT_FALSE(signal.announce(kLargest));
  EXPECT_TRUE(signal.wait(kLargest, 0.0));
}

// Either the waiter sees the number, or whoever announces it learns that the waiter sleeps: never both, never
// neither.
TEST(Signal, NobodySleepsUnnoticed) {
  Signal signal;
  for (std::uint32_t i = 1; i <= 2000; ++i) {
    bool noticed = false;
    std::thread other([&] { noticed = signal.announce(i); });
    const bool slept = signal.sleep(i);
    other.join();
    ASSERT_EQ(noticed, slept) << i;
    ASSERT_TRUE(signal.wait(i, 0.0)) << i;
  }
}

TEST(SharedMemory, IsSharedByTwoMappingsAndOutlivesItsFile) {
  SharedMemory own(128);
  ASSERT_GE(own.file(), 0);
  EXPECT_THROW(SharedMemory(own.file(), 64), std::system_error);
  EXPECT_THROW(SharedMemory(-1, 128), std::system_error);
  SharedMemory other(own.file(), 128);
  EXPECT_EQ(other.file(), -1);
  own.close_file();
  EXPECT_EQ(own.file(), -1);
  static_cast<char*>(own.data())[127] = 5;
  EXPECT_EQ(static_cast<char*>(other.data())[127], 5);
  EXPECT_EQ(static_cast<char*>(other.data())[0], 0);
}

TEST(ReadMemory, ReadsThatOfAnotherProcess) {
  std::vector<int> numbers(1 << 20), found(numbers.size());
  std::iota(numbers.begin(), numbers.end(), 7);
  int hold[2];
  ASSERT_EQ(pipe(hold), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(hold[1]);
    char byte;
    _exit(read(hold[0], &byte, 1) == 0 ? 0 : 1);  // until the parent closes its end
  }
  const std::vector<int> expected = numbers;
  std::fill(numbers.begin(), numbers.end(), 0);  // of this process; the child has its own
  const auto address = reinterpret_cast<std::uintptr_t>(numbers.data());
  EXPECT_EQ(read_memory(child, address, found.data(), found.size() * sizeof(int)), 0);
  EXPECT_EQ(found, expected);
  close(hold[1]);
  close(hold[0]);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(read_memory(child, address, found.data(), 4), ESRCH);
}

TEST(ReadMemory, RefusesMemoryThatIsNotThere) {
  const long page = sysconf(_SC_PAGESIZE);
  void* memory = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  ASSERT_EQ(munmap(static_cast<char*>(memory) + page, page), 0);
  std::vector<char> found(2 * page);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  EXPECT_EQ(read_memory(getpid(), address, found.data(), page), 0);
  EXPECT_EQ(read_memory(getpid(), address, found.data(), 2 * page), EFAULT);  // the first call reads one page
  munmap(memory, page);
}

TEST(ReadPieces, ReadsThemToTheirPlacesWithZerosBetween) {
  constexpr std::size_t kNumber = 2500;  // more than the system takes in one call
  std::vector<unsigned char> memory(4 * kNumber), found(4 * kNumber + 9, 77), expected(found.size());
  std::iota(memory.begin(), memory.end(), 1);
  std::vector<Piece> table;
  for (std::size_t i = 0; i < kNumber; ++i) {  // in the opposite order, with a gap after every other one
    const std::size_t start = 4 * i + 5, bytes = 4 - i % 2, from = 4 * (kNumber - 1 - i);
    table.push_back({start, reinterpret_cast<std::uintptr_t>(&memory[from]), bytes});
    std::copy_n(&memory[from], bytes, &expected[start]);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(table.data());
  std::vector<Piece> copy(kNumber);
  ASSERT_EQ(read_table(getpid(), address, kNumber, found.size(), copy.data()), 0);
  EXPECT_EQ(read_pieces(getpid(), copy.data(), kNumber, 0, found.data(), found.size()), 0);
  EXPECT_EQ(found, expected);
  for (std::size_t start = 0; start < 20; ++start) {
    for (const std::size_t bytes : {0, 1, 6, 4001}) {
      std::vector<unsigned char> range(bytes, 77);
      EXPECT_EQ(read_pieces(getpid(), copy.data(), kNumber, start, range.data(), bytes), 0);
      EXPECT_TRUE(std::equal(range.begin(), range.end(), &expected[start])) << bytes << " from " << start;
    }
  }
  EXPECT_EQ(read_pieces(getpid(), nullptr, 0, 0, found.data(), found.size()), 0);
  EXPECT_EQ(found, std::vector<unsigned char>(found.size()));
  EXPECT_EQ(read_pieces(getpid(), nullptr, 0, 0, nullptr, 0), 0);
}

TEST(ReadTable, RefusesPiecesThatAreNotInOrder) {
  int value = 5;
  const auto at = reinterpret_cast<std::uintptr_t>(&value);
  std::vector<Piece> copy(2);
  const auto read = [&](const std::vector<Piece>& table) {
    return read_table(getpid(), reinterpret_cast<std::uintptr_t>(table.data()), table.size(), 8, copy.data());
  };
  EXPECT_EQ(read({{0, at, 4}, {4, at, 4}}), 0);
  EXPECT_EQ(read({{4, at, 4}, {0, at, 4}}), EINVAL);
  EXPECT_EQ(read({{0, at, 4}, {3, at, 4}}), EINVAL);
  EXPECT_EQ(read({{5, at, 4}}), EINVAL);
  EXPECT_EQ(read({{9, at, 0}}), EINVAL);
  EXPECT_EQ(read({{4, at, static_cast<std::uint64_t>(-4)}}), EINVAL);
  EXPECT_EQ(read_table(getpid(), 0, 1, 8, copy.data()), EFAULT);
  const Piece nowhere{0, 0, 4};
  EXPECT_EQ(read_pieces(getpid(), &nowhere, 1, 0, &value, 4), EFAULT);
}

}  // namespace
}  // namespace lightning_zero

#endif
