#include <cerrno>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "disk_blocks.h"
#include "lightning_zero/disk.h"

namespace lightning_zero {
namespace {

// The blocks of one call, which the threads share.
struct Job {
  std::size_t open = 0;  // blocks that have not ended
  std::optional<TransferFailure> failure;
};

std::int64_t call(const DiskCalls& calls, const Block& block) {
  const Transfer& rest = block.rest();
  const auto offset = static_cast<off_t>(rest.offset);
  const ssize_t result = block.direction() == Direction::read
                             ? calls.read(rest.file, rest.memory, rest.bytes, offset)
                             : calls.write(rest.file, rest.memory, rest.bytes, offset);
  return result < 0 ? -errno : result;
}

std::optional<TransferFailure> transfer_block(const DiskCalls& calls, Block block) {
  while (true) {
    switch (block.take(call(calls, block))) {
      case Block::Next::ends:
        return std::nullopt;
      case Block::Next::again:
        break;
      case Block::Next::later:
        calls.pause();
        break;
      case Block::Next::fails:
        return block.failure();
    }
  }
}

}  // namespace

class DiskThreads::Workers {
 public:
  Workers(std::size_t threads, std::size_t block, const DiskCalls& calls) : calls_(calls), block_(block) {
    try {
      while (threads_.size() < threads) threads_.emplace_back(&Workers::work, this);
    } catch (const std::exception&) {  // a limit of the system, or no memory: use the existing threads
      if (threads_.empty()) throw;
    }
  }

  ~Workers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::optional<TransferFailure> run(Direction direction, const Transfer& transfer, std::size_t alignment) {
    Job job;
    std::list<Waiting> blocks;  // threads see all of them or, if there is not enough memory, none
    Cutter cutter(direction, transfer, alignment, block_);
    while (const std::optional<Block> block = cutter.next()) blocks.push_back({&job, *block});
    job.open = blocks.size();
    std::unique_lock<std::mutex> lock(mutex_);
    blocks_.splice(blocks_.end(), blocks);
    wake_.notify_all();
    done_.wait(lock, [&job] { return job.open == 0; });
    return job.failure;
  }

 private:
  struct Waiting {
    Job* job;
    Block block;
  };

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ends_ || !blocks_.empty(); });
      if (blocks_.empty()) return;
      const auto [job, block] = blocks_.front();
      blocks_.pop_front();
      if (!job->failure) {
        lock.unlock();
        const auto failure = transfer_block(calls_, block);
        lock.lock();
        if (failure) note_failure(job->failure, *failure);
      }
      if (--job->open == 0) done_.notify_all();
    }
  }

  const DiskCalls calls_;
  const std::size_t block_;
  std::mutex mutex_;  // guards the members below, and the jobs
  std::condition_variable wake_;
  std::condition_variable done_;
  std::list<Waiting> blocks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

DiskThreads::DiskThreads(std::size_t threads, std::size_t block, const DiskCalls& calls)
    : workers_(std::make_unique<Workers>(threads, block, calls)) {}

DiskThreads::~DiskThreads() {
  // The child of a fork has no threads to wait for, so the object is leaked there.
  if (forked()) static_cast<void>(workers_.release());
}

std::optional<TransferFailure> DiskThreads::run(Direction direction, const Transfer& transfer,
                                                std::size_t alignment) {
  return workers_->run(direction, transfer, alignment);
}

}  // namespace lightning_zero
