// Reads and writes of files, many blocks at a time: a disk is fast only when it is asked for many. Two
// backends do so, each a DiskPool: threads, and rings of io_uring (disk_rings.h).
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

enum class Direction { read, write };

// The system's calls below the threads; tests put others in their place.
struct DiskCalls {
  ssize_t (*read)(int file, void* memory, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* memory, std::size_t bytes, off_t offset);
  void (*pause)();  // before what the system has refused for now is tried again
};

extern const DiskCalls kSystemDiskCalls;

// Transfers go in blocks, several at a time. Every result is checked: what was interrupted or came short goes
// on where it stopped, and what fails is reported with the first place that failed.
class DiskPool {
 public:
  DiskPool();
  virtual ~DiskPool() = default;  // after the last transfer
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Fills the memory of all transfers, or the files from it, and returns when all has ended: the memory is
  // the caller's again. `alignment` divides every address, length and offset, and every block: that which the
  // file was opened with O_DIRECT for, or 1. After a failure blocks that have not begun are left out. Any
  // thread may call. Throws std::logic_error in the child of a fork, which has neither threads nor a ring of
  // its own.
  std::optional<TransferFailure> transfer(Direction direction, const std::vector<Transfer>& transfers,
                                          std::size_t alignment);

 protected:
  bool forked() const;  // whether this is another process than the one that has made the pool

 private:
  virtual std::optional<TransferFailure> run(Direction direction, const std::vector<Transfer>& transfers,
                                             std::size_t alignment) = 0;

  const pid_t process_;
};

// Blocks by calls of pread and pwrite, each in a thread.
class DiskThreads : public DiskPool {
 public:
  // `threads` >= 1 blocks of at most `block` bytes (> 0) at a time. Throws std::system_error where not a
  // single thread can be made.
  DiskThreads(std::size_t threads, std::size_t block, const DiskCalls& calls = kSystemDiskCalls);
  ~DiskThreads() override;

 private:
  class Workers;

  std::optional<TransferFailure> run(Direction direction, const std::vector<Transfer>& transfers,
                                     std::size_t alignment) override;

  std::unique_ptr<Workers> workers_;
};

}  // namespace lightning_zero
