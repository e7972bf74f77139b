#include "lightning_zero/disk_rings.h"

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "disk_blocks.h"

namespace lightning_zero {
namespace {

constexpr std::size_t kMostRequests = 4096;  // per ring; the kernel allows 32768

// Transfers the blocks of one call by a ring. It does not allocate while requests are under way, so that
// nothing is thrown then, and the memory that the kernel fills stays valid.
class Session {
 public:
  Session(std::size_t depth, void (*pause)()) : pause_(pause), slots_(depth) { pushed_.reserve(depth); }

  // Returns when all requests have ended.
  std::optional<TransferFailure> run(Ring& ring, Cutter cutter) {
    ring_ = &ring;
    while (true) {
      push_more(cutter);
      if (pushed_.empty() && under_way_ == 0) return failure_;
      submit();
      reap();
    }
  }

  // Whether the kernel has refused requests, or failed to report their completion.
  bool broken() const { return broken_; }

 private:
  struct Slot {
    Block block;
    bool busy = false;
  };

  void push_more(Cutter& cutter) {
    for (std::size_t tag = 0; tag < slots_.size() && !failure_; ++tag) {
      if (slots_[tag].busy) continue;
      const std::optional<Block> block = cutter.next();
      if (!block) return;
      slots_[tag] = {*block, true};
      push(tag);
    }
  }

  void push(std::size_t tag) {
    const Block& block = slots_[tag].block;
    ring_->push(block.direction(), block.rest(), tag);
    pushed_.push_back(tag);
  }

  void submit() {
    if (broken_) {  // completions arrive without a system call
      pause_();
      return;
    }
    const int submitted = ring_->submit();
    if (submitted > 0) {
      pushed_.erase(pushed_.begin(), pushed_.begin() + submitted);
      under_way_ += static_cast<std::size_t>(submitted);
    } else if (submitted == -EAGAIN || submitted == -EBUSY) {
      // No memory for requests, or no room for completions; both become free when requests end.
      ++refused_ < kTries ? pause_() : give_up(-submitted);
    } else if (submitted == 0) {  // there were completions already
      if (++refused_ == kTries) give_up(EIO);
    } else if (submitted != -EINTR) {
      give_up(-submitted);
    }
  }

  void reap() {
    for (Completion completion{}; ring_->pop(&completion);) {
      --under_way_;
      refused_ = 0;
      Slot& slot = slots_[completion.tag];
      Block::Next next = slot.block.take(completion.result);
      if (broken_) next = Block::Next::ends;  // its failure has been noted
      slot.busy = next == Block::Next::again || next == Block::Next::later;
      if (next == Block::Next::later) pause_();
      if (next == Block::Next::fails) note_failure(failure_, slot.block.failure());
      if (slot.busy) push(completion.tag);
    }
  }

  // Makes all blocks fail; run() still waits for those under way.
  void give_up(int code) {
    broken_ = true;
    for (const Slot& slot : slots_) {
      if (slot.busy) note_failure(failure_, {code, slot.block.rest().offset});
    }
    ring_->withdraw();
    for (const std::size_t tag : pushed_) slots_[tag].busy = false;
    pushed_.clear();
  }

  Ring* ring_ = nullptr;
  void (*const pause_)();
  std::vector<Slot> slots_;
  std::vector<std::size_t> pushed_;  // tags of queued requests that were not submitted, in order
  std::size_t under_way_ = 0;
  int refused_ = 0;  // refusals since a request has ended
  bool broken_ = false;
  std::optional<TransferFailure> failure_;
};

}  // namespace

DiskRings::DiskRings(std::size_t depth, std::size_t block, MakeRing make, void (*pause)())
    : depth_(std::min(depth, kMostRequests)), block_(block), make_(make), pause_(pause) {
  give(take());
}

std::optional<TransferFailure> DiskRings::run(Direction direction, const Transfer& transfer,
                                              std::size_t alignment) {
  Session session(depth_, pause_);  // before there is a ring, which would be lost if there was no memory
  std::unique_ptr<Ring> ring;
  try {
    ring = take();
  } catch (const std::system_error& error) {
    return TransferFailure{error.code().value(), transfer.offset};
  }
  const auto failure = session.run(*ring, Cutter(direction, transfer, alignment, block_));
  if (session.broken()) ring.reset();
  give(std::move(ring));
  return failure;
}

std::unique_ptr<Ring> DiskRings::take() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (idle_.empty()) {
    try {
      idle_.reserve(rings_ + 1);
      std::unique_ptr<Ring> made = make_(depth_);
      ++rings_;
      return made;
    } catch (const std::system_error&) {  // a limit of the system: use the existing rings
      if (rings_ == 0) throw;
    }
    given_.wait(lock);
  }
  std::unique_ptr<Ring> ring = std::move(idle_.back());
  idle_.pop_back();
  return ring;
}

void DiskRings::give(std::unique_ptr<Ring> ring) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ring) {
      idle_.push_back(std::move(ring));
    } else {
      --rings_;
    }
  }
  given_.notify_all();
}

}  // namespace lightning_zero
