// Reads and writes files by io_uring, which submits many blocks to the kernel in one system call.
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

// The result of a request.
struct Completion {
  std::size_t tag;      // the tag of the request
  std::int64_t result;  // the number of bytes transferred, or a negative errno
};

// The interface to the system: a queue of requests and a queue of completions, for one thread at a time.
// Tests replace the kernel's.
class Ring {
 public:
  virtual ~Ring() = default;  // no request may be under way
  // Queues a request. The number of requests queued or under way must not exceed that which the ring was made
  // for.
  virtual void push(Direction direction, const Transfer& transfer, std::size_t tag) = 0;
  // Submits the queued requests in order, and waits until a request has ended. Returns the number of
  // submitted requests; if these are not all, it does not wait. Returns a negative errno if none was
  // submitted.
  virtual int submit() = 0;
  // Takes the next completion, in any order; returns whether there is one.
  virtual bool pop(Completion* completion) = 0;
  // Removes the queued requests that were not submitted.
  virtual void withdraw() = 0;
};

// Makes a ring for at most `requests` requests. Throws std::system_error if the system refuses.
using MakeRing = std::unique_ptr<Ring> (*)(std::size_t requests);

std::unique_ptr<Ring> make_kernel_ring(std::size_t requests);

// The reason why the system refuses rings or lacks them; empty if it provides them.
std::string io_uring_refusal();

// Transfers blocks by rings. Each call uses a ring of its own: its thread submits all requests and waits for
// their end, because the kernel cancels the requests of a thread that exits.
class DiskRings : public DiskPool {
 public:
  // Each call transfers `depth` >= 1 blocks of at most `block` > 0 bytes at a time. Throws std::system_error
  // if not a single ring can be made.
  DiskRings(std::size_t depth, std::size_t block, MakeRing make = make_kernel_ring,
            void (*pause)() = kSystemDiskCalls.pause);

 private:
  std::optional<TransferFailure> run(Direction direction, const Transfer& transfer,
                                     std::size_t alignment) override;
  std::unique_ptr<Ring> take();
  void give(std::unique_ptr<Ring> ring);  // a null pointer stands for a ring that is broken

  const std::size_t depth_;
  const std::size_t block_;
  const MakeRing make_;
  void (*const pause_)();
  std::mutex mutex_;  // guards the members below
  std::condition_variable given_;
  std::size_t rings_ = 0;  // number of rings, idle or in use
  std::vector<std::unique_ptr<Ring>> idle_;
};

}  // namespace lightning_zero
