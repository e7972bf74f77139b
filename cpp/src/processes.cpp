#include "lightning_zero/processes.h"

#include <cerrno>
#include <stdexcept>
#include <system_error>

#ifdef __linux__

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <vector>

namespace lightning_zero {
namespace {

using Clock = std::chrono::steady_clock;

static_assert(sizeof(Signal) == sizeof(std::uint32_t) && std::atomic<std::uint32_t>::is_always_lock_free,
              "the kernel compares the word of a futex itself");

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* limit) {
  // Not FUTEX_PRIVATE_FLAG: another process wakes the waiter, through its own mapping of the memory.
  return syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

// Reads pieces of another process's memory to their places in `target`. A call that reads less than it is
// asked for has come to memory that is not there.
int read_each(std::int64_t process, const Piece* pieces, std::size_t number, void* target) {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // bytes in a call; the system reads less than 2 GiB
  std::vector<iovec> own, other;
  std::size_t asked = 0;
  const auto read = [&] {
    const ssize_t count =
        process_vm_readv(static_cast<pid_t>(process), own.data(), own.size(), other.data(), other.size(), 0);
    const int error = count < 0 ? errno : static_cast<std::size_t>(count) < asked ? EFAULT : 0;
    own.clear();
    other.clear();
    asked = 0;
    return error;
  };
  for (const Piece* piece = pieces; piece != pieces + number; ++piece) {
    for (std::size_t done = 0; done < piece->bytes;) {
      const std::size_t bytes = std::min<std::size_t>(piece->bytes - done, kMost - asked);
      own.push_back({static_cast<char*>(target) + piece->start + done, bytes});
      other.push_back({reinterpret_cast<void*>(piece->address + done), bytes});
      done += bytes;
      asked += bytes;
      if (own.size() == IOV_MAX || asked == kMost) {
        if (const int error = read()) return error;
      }
    }
  }
  return asked == 0 ? 0 : read();
}

}  // namespace

bool Signal::announce(std::uint32_t value) {
  const std::uint32_t before = word_.exchange(value << 1, std::memory_order_acq_rel);
  futex(word_, FUTEX_WAKE, INT_MAX, nullptr);
  return before & 1;
}

bool Signal::wait(std::uint32_t value, double seconds) {
  const auto until =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    const std::uint32_t word = word_.load(std::memory_order_acquire);
    if (word >> 1 == value) return true;
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now()).count();
    if (left <= 0) return false;
    constexpr long kNanoseconds = 1'000'000'000;
    const timespec limit{static_cast<time_t>(left / kNanoseconds), static_cast<long>(left % kNanoseconds)};
    futex(word_, FUTEX_WAIT, word,
          &limit);  // returns at once if the word has changed; errors are looked at again
  }
}

bool Signal::sleep(std::uint32_t value) {
  std::uint32_t word = word_.load(std::memory_order_acquire);
  while (word >> 1 != value) {
    if (word_.compare_exchange_weak(word, word | 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes) {
  // The C library has no memfd_create before version 2.27.
  constexpr unsigned kCloseOnExec = 1;
  file_ = static_cast<int>(syscall(SYS_memfd_create, "lightning_zero", kCloseOnExec));
  if (file_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  try {
    if (ftruncate(file_, static_cast<off_t>(bytes)) != 0)
      throw std::system_error(errno, std::generic_category(), "ftruncate");
    map(file_);
  } catch (...) {
    close_file();
    throw;
  }
}

SharedMemory::SharedMemory(int file, std::size_t bytes) : bytes_(bytes) {
  struct stat found{};
  if (fstat(file, &found) != 0) throw std::system_error(errno, std::generic_category(), "fstat");
  if (static_cast<std::size_t>(found.st_size) != bytes)
    throw std::system_error(EINVAL, std::generic_category(), "the file has another size");
  map(file);
}

SharedMemory::~SharedMemory() {
  munmap(data_, bytes_);
  close_file();
}

void SharedMemory::close_file() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

void SharedMemory::map(int file) {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
}

int read_memory(std::int64_t process, std::uintptr_t address, void* target, std::size_t bytes) {
  const Piece whole{0, address, bytes};
  return read_each(process, &whole, 1, target);
}

int read_table(std::int64_t process, std::uintptr_t table, std::size_t count, std::size_t bytes,
               Piece* pieces) {
  if (const int error = read_memory(process, table, pieces, count * sizeof(Piece))) return error;
  std::size_t end = 0;
  for (const Piece* piece = pieces; piece != pieces + count; ++piece) {
    if (piece->start < end || piece->start > bytes || piece->bytes > bytes - piece->start) return EINVAL;
    end = piece->start + piece->bytes;
  }
  return 0;
}

int read_pieces(std::int64_t process, const Piece* pieces, std::size_t count, std::size_t start, void* target,
                std::size_t bytes) {
  const std::size_t stop = start + bytes;
  const Piece* piece = std::partition_point(
      pieces, pieces + count, [&](const Piece& each) { return each.start + each.bytes <= start; });
  std::vector<Piece> asked;
  std::size_t end = 0;
  const auto fill_to = [&](std::size_t from) {
    if (from > end) std::memset(static_cast<char*>(target) + end, 0, from - end);
  };
  for (; piece != pieces + count && piece->start < stop; ++piece) {
    const std::size_t low = std::max<std::size_t>(piece->start, start);
    const std::size_t high = std::min<std::size_t>(piece->start + piece->bytes, stop);
    if (low < high) {
      fill_to(low - start);
      end = high - start;
      asked.push_back({low - start, piece->address + (low - piece->start), high - low});
    }
  }
  fill_to(bytes);
  return read_each(process, asked.data(), asked.size(), target);
}

}  // namespace lightning_zero

#else

namespace lightning_zero {

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes) {
  throw std::system_error(ENOSYS, std::generic_category());
}
SharedMemory::SharedMemory(int, std::size_t bytes) : SharedMemory(bytes) {}
SharedMemory::~SharedMemory() = default;
void SharedMemory::close_file() {}
void SharedMemory::map(int) {}

// Nobody comes here: there is no memory to share.
bool Signal::announce(std::uint32_t) { throw std::logic_error("there are no futexes"); }
bool Signal::wait(std::uint32_t, double) { throw std::logic_error("there are no futexes"); }
bool Signal::sleep(std::uint32_t) { throw std::logic_error("there are no futexes"); }

int read_memory(std::int64_t, std::uintptr_t, void*, std::size_t) { return ENOSYS; }
int read_table(std::int64_t, std::uintptr_t, std::size_t, std::size_t, Piece*) { return ENOSYS; }
int read_pieces(std::int64_t, const Piece*, std::size_t, std::size_t, void*, std::size_t) { return ENOSYS; }

}  // namespace lightning_zero

#endif
