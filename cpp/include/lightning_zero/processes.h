// Memory and signals that processes of a machine share, and reads of another process's memory. Linux only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace lightning_zero {

// A number in memory that two processes share: one announces numbers there, the other waits for them.
//
// A waiter that has had patience for long enough can fall asleep for good, to be woken by other means.
// Whoever announces the number learns of it, and must wake it. All zeros are a signal on which nothing was
// announced.
class Signal {
 public:
  // Announces `value`, below 2^31 and another than the last; returns whether the waiter sleeps.
  bool announce(std::uint32_t value);
  // Waits until `value` is announced, for `seconds` at most; returns whether it was.
  bool wait(std::uint32_t value, double seconds);
  // Falls asleep unless `value` was announced; returns whether it does.
  bool sleep(std::uint32_t value);

 private:
  std::atomic<std::uint32_t> word_{0};  // the value, and in the lowest bit whether the waiter sleeps
};

// Memory that processes share: a file without a name, mapped into each of them.
class SharedMemory {
 public:
  // Makes `bytes` bytes of zeros. Throws std::system_error.
  explicit SharedMemory(std::size_t bytes);
  // Maps the memory whose file is open in this process as `file`. Throws std::system_error if it has another
  // size.
  SharedMemory(int file, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // The file, while it is open; others find it in /proc. -1 if this process did not make it, or has closed
  // it.
  int file() const { return file_; }
  // Closes the file. The memory stays.
  void close_file();

 private:
  void map(int file);

  std::size_t bytes_;
  int file_ = -1;
  void* data_ = nullptr;
};

// Fills `target` with `bytes` bytes of the memory of `process`, by process_vm_readv(2).
//
// Returns 0, or the system's error number if the process has ended or does not allow it, or has no such
// memory.
int read_memory(std::int64_t process, std::uintptr_t address, void* target, std::size_t bytes);

// A piece of a message: `bytes` bytes at `address` in the memory of the process that has it. In the message
// they begin at byte `start`.
struct Piece {
  std::uint64_t start, address, bytes;
};

// Copies to `pieces` the table of a message of `bytes` bytes, which lies in pieces in the memory of
// `process`: `table` is the address, in that process, of an array of `count` pieces in ascending order, which
// do not overlap.
//
// Returns as `read_memory` does; EINVAL if the table is not as described.
int read_table(std::int64_t process, std::uintptr_t table, std::size_t count, std::size_t bytes,
               Piece* pieces);

// Fills `target` with `bytes` bytes of a message, from byte `start` on, with zeros between its pieces. The
// table of `count` pieces is one that `read_table` has accepted.
//
// Returns as `read_memory` does.
int read_pieces(std::int64_t process, const Piece* pieces, std::size_t count, std::size_t start, void* target,
                std::size_t bytes);

}  // namespace lightning_zero
