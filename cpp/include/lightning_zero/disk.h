// Reads and writes files, many blocks at a time, since a disk is fast only with many requests under way.
// There are two backends, each a DiskPool: threads, and rings of io_uring (disk_rings.h).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace lightning_zero {

// A range of an open file, and the memory to read it into or write it from.
struct Transfer {
  int file;
  void* memory;
  std::size_t bytes;
  std::uint64_t offset;
};

// The failure of a transfer: `code` is an errno, or 0 if the file ends before the range does.
struct TransferFailure {
  int code;
  std::uint64_t offset;
};

enum class Direction { read, write };

// The system calls that the threads use; tests replace them.
struct DiskCalls {
  ssize_t (*read)(int file, void* memory, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* memory, std::size_t bytes, off_t offset);
  void (*pause)();  // waits before a temporarily refused call is tried again
};

extern const DiskCalls kSystemDiskCalls;

// Transfers ranges in blocks, several at a time. Every result is checked: a block that was interrupted or
// transferred in part continues where it stopped, and of failures the one with the smallest offset is
// reported.
class DiskPool {
 public:
  DiskPool();
  virtual ~DiskPool() = default;  // after the last transfer
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Reads or writes a range and returns when all of its blocks have ended, so that the memory is the caller's
  // again. Address, length, offset and the block length must be multiples of `alignment`: the alignment that
  // O_DIRECT requires, or 1. After a failure, blocks that have not begun are skipped. May be called from any
  // thread. Throws std::logic_error in the child of a fork, which has neither the threads nor the rings.
  std::optional<TransferFailure> transfer(Direction direction, const Transfer& transfer,
                                          std::size_t alignment);

 protected:
  bool forked() const;  // whether this process is not the one that has made the pool

 private:
  virtual std::optional<TransferFailure> run(Direction direction, const Transfer& transfer,
                                             std::size_t alignment) = 0;

  const pid_t process_;
};

// Transfers blocks by threads that call pread and pwrite.
class DiskThreads : public DiskPool {
 public:
  // Transfers `threads` >= 1 blocks of at most `block` > 0 bytes at a time. Throws std::system_error if not a
  // single thread can be made.
  DiskThreads(std::size_t threads, std::size_t block, const DiskCalls& calls = kSystemDiskCalls);
  ~DiskThreads() override;

 private:
  class Workers;

  std::optional<TransferFailure> run(Direction direction, const Transfer& transfer,
                                     std::size_t alignment) override;

  std::unique_ptr<Workers> workers_;
};

}  // namespace lightning_zero
