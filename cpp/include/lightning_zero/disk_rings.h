// Reads and writes of files by io_uring, whose system calls hand many blocks at once to the kernel.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "lightning_zero/disk.h"

namespace lightning_zero {

// What a request has ended in.
struct Completion {
  std::size_t tag;      // that it was pushed with
  std::int64_t result;  // the bytes that were transferred, or an errno negated
};

// The system below the rings: a queue of requests and one of completions, for one thread at a time. Tests put
// others in the place of the kernel's.
class Ring {
 public:
  virtual ~Ring() = default;  // with no request under way
  // Puts down a request; at most as many are put down or under way as the ring was made for.
  virtual void push(Direction direction, const Transfer& transfer, std::size_t tag) = 0;
  // Hands over what was put down, in its order, and waits until a request has ended. Returns how many were
  // handed over, which may be fewer and then does not wait; or an errno negated, when none was.
  virtual int submit() = 0;
  // Takes the next completion, in any order; returns whether there is one.
  virtual bool pop(Completion* completion) = 0;
  // Takes back what was put down and not handed over.
  virtual void withdraw() = 0;
};

// Makes one for so many requests. Throws std::system_error where the system refuses.
using MakeRing = std::unique_ptr<Ring> (*)(std::size_t requests);

std::unique_ptr<Ring> make_kernel_ring(std::size_t requests);

// Why the system refuses rings, or has none; empty where it gives them.
std::string io_uring_refusal();

// Blocks by requests of rings. A call has a ring of its own while it lasts: its thread submits all requests
// and stays until they have ended, because the kernel fails those of a thread that has gone.
class DiskRings : public DiskPool {
 public:
  // `depth` >= 1 blocks of at most `block` bytes (> 0) at a time, in each call. Throws std::system_error
  // where there is not a single ring.
  DiskRings(std::size_t depth, std::size_t block, MakeRing make = make_kernel_ring,
            void (*pause)() = kSystemDiskCalls.pause);

 private:
  std::optional<TransferFailure> run(Direction direction, const std::vector<Transfer>& transfers,
                                     std::size_t alignment) override;
  std::unique_ptr<Ring> take();
  void give(std::unique_ptr<Ring> ring);  // a null pointer for one that is of no use any more

  const std::size_t depth_;
  const std::size_t block_;
  const MakeRing make_;
  void (*const pause_)();
  std::mutex mutex_;  // guards what follows
  std::condition_variable given_;
  std::size_t rings_ = 0;  // those that calls have, too
  std::vector<std::unique_ptr<Ring>> idle_;
};

}  // namespace lightning_zero
