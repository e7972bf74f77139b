#include "lightning_zero/disk.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace lightning_zero {
namespace {

// Tries without any progress after which a transfer is given up: of EAGAIN for about ten seconds.
constexpr int kTries = 10000;
// A transfer that comes short of an aligned block either meets the end of the file or is tried again.
constexpr int kShortTries = 16;

enum class Direction { read, write };

// One call of `read` or `write`, whose blocks the threads share.
struct Job {
  Direction direction;
  std::size_t alignment;
  std::size_t open = 0;  // blocks that have not ended
  std::optional<TransferFailure> failure;
};

struct Block {
  Job* job;
  Transfer transfer;
};

std::optional<TransferFailure> transfer_block(const DiskCalls& calls, Direction direction, Transfer rest,
                                              std::size_t alignment) {
  int refused = 0;
  int short_of_a_block = 0;
  while (rest.bytes > 0) {
    const ssize_t result =
        direction == Direction::read
            ? calls.read(rest.file, rest.memory, rest.bytes, static_cast<off_t>(rest.offset))
            : calls.write(rest.file, rest.memory, rest.bytes, static_cast<off_t>(rest.offset));
    if (result < 0) {
      const int code = errno;
      if (code == EINTR) continue;
      if ((code == EAGAIN || code == EWOULDBLOCK) && ++refused < kTries) {
        calls.pause();
        continue;
      }
      return TransferFailure{code, rest.file, rest.offset};
    }
    auto done = static_cast<std::size_t>(result);
    // What is left must be aligned, too; a part of a block is transferred once more.
    if (done < rest.bytes) done -= done % alignment;
    if (done == 0) {
      const bool ended = direction == Direction::read && result == 0;
      if (ended || ++short_of_a_block == kShortTries) {
        return TransferFailure{direction == Direction::read ? 0 : EIO, rest.file, rest.offset};
      }
      continue;
    }
    refused = short_of_a_block = 0;
    rest.memory = static_cast<char*>(rest.memory) + done;
    rest.bytes -= done;
    rest.offset += done;
  }
  return std::nullopt;
}

}  // namespace

const DiskCalls kSystemDiskCalls = {::pread, ::pwrite,
                                    [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }};

class DiskPool::Threads {
 public:
  Threads(std::size_t threads, std::size_t block, const DiskCalls& calls)
      : calls_(calls), block_(block), process_(getpid()) {
    try {
      while (workers_.size() < threads) workers_.emplace_back(&Threads::work, this);
    } catch (const std::system_error&) {  // a limit of the system: those that there are do the work
      if (workers_.empty()) throw;
    }
  }

  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  // Whether this is the process that made them, and not the child of a fork, which has none of the threads.
  bool alive() const { return process_ == getpid(); }

  std::optional<TransferFailure> run(Direction direction, const std::vector<Transfer>& transfers,
                                     std::size_t alignment) {
    Job job{direction, alignment, 0, std::nullopt};
    std::unique_lock<std::mutex> lock(mutex_);
    for (const Transfer& transfer : transfers) {
      for (std::size_t start = 0; start < transfer.bytes; start += block_) {
        blocks_.push_back({&job,
                           {transfer.file, static_cast<char*>(transfer.memory) + start,
                            std::min(block_, transfer.bytes - start), transfer.offset + start}});
        ++job.open;
      }
    }
    wake_.notify_all();
    done_.wait(lock, [&job] { return job.open == 0; });
    return job.failure;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ends_ || !blocks_.empty(); });
      if (blocks_.empty()) return;
      const Block block = blocks_.front();
      blocks_.pop_front();
      Job& job = *block.job;
      if (!job.failure) {
        lock.unlock();
        const auto failure = transfer_block(calls_, job.direction, block.transfer, job.alignment);
        lock.lock();
        if (failure && (!job.failure || failure->offset < job.failure->offset)) job.failure = failure;
      }
      if (--job.open == 0) done_.notify_all();
    }
  }

  const DiskCalls calls_;
  const std::size_t block_;
  const pid_t process_;
  std::mutex mutex_;  // guards what follows, and the jobs
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Block> blocks_;
  bool ends_ = false;
  std::vector<std::thread> workers_;
};

DiskPool::DiskPool(std::size_t threads, std::size_t block, const DiskCalls& calls)
    : threads_(std::make_unique<Threads>(threads, block, calls)) {}

DiskPool::~DiskPool() {
  // In the child of a fork nobody would ever end the wait for the threads.
  if (!threads_->alive()) static_cast<void>(threads_.release());
}

std::optional<TransferFailure> DiskPool::read(const std::vector<Transfer>& transfers, std::size_t alignment) {
  return threads_->run(Direction::read, transfers, alignment);
}

std::optional<TransferFailure> DiskPool::write(const std::vector<Transfer>& transfers,
                                               std::size_t alignment) {
  return threads_->run(Direction::write, transfers, alignment);
}

}  // namespace lightning_zero
