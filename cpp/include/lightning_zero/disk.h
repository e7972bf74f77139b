// Reads and writes of files, by threads of their own: a disk is fast only when it is asked for many blocks at
// a time.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace lightning_zero {

// A range of an open file and the memory that it is read into or written from.
struct Transfer {
  int file;
  void* memory;
  std::size_t bytes;
  std::uint64_t offset;
};

// How a transfer failed: `code` is an errno, or 0 where the file ends before the range does.
struct TransferFailure {
  int code;
  int file;
  std::uint64_t offset;
};

// The system's calls below the pool; tests put others in their place.
struct DiskCalls {
  ssize_t (*read)(int file, void* memory, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* memory, std::size_t bytes, off_t offset);
  void (*pause)();  // before a transfer that the system has refused for now (EAGAIN) is tried again
};

extern const DiskCalls kSystemDiskCalls;

// Transfers go in blocks, several at a time. Every result is checked: what was interrupted or came short goes
// on where it stopped, and what fails is reported with the first place that failed.
class DiskPool {
 public:
  // `threads` >= 1 blocks of at most `block` bytes (> 0) at a time. Throws std::system_error where not a
  // single thread can be made.
  DiskPool(std::size_t threads, std::size_t block, const DiskCalls& calls = kSystemDiskCalls);
  ~DiskPool();  // after the last transfer
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Each fills the memory of all transfers, or the files from it, and returns when all has ended. `alignment`
  // divides every address, length and offset, and every block: that which the file was opened with O_DIRECT
  // for, or 1. After a failure blocks that have not begun are left out. Any thread may call; in the child of
  // a fork none may.
  std::optional<TransferFailure> read(const std::vector<Transfer>& transfers, std::size_t alignment);
  std::optional<TransferFailure> write(const std::vector<Transfer>& transfers, std::size_t alignment);

 private:
  class Threads;
  std::unique_ptr<Threads> threads_;
};

}  // namespace lightning_zero
