#include "lightning_zero/disk.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "disk_blocks.h"

namespace lightning_zero {
namespace {

// The number of tries of a transfer that ends before the next aligned position; after them it fails.
constexpr int kShortTries = 16;

}  // namespace

const DiskCalls kSystemDiskCalls = {::pread, ::pwrite,
                                    [] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }};

Block::Next Block::take(std::int64_t result) {
  if (result < 0) {
    code_ = static_cast<int>(-result);
    if (code_ == EINTR) return Next::again;
    // ECANCELED: the kernel cancels a request that it cannot continue in the background.
    const bool for_now = code_ == EAGAIN || code_ == EWOULDBLOCK || code_ == ECANCELED;
    return for_now && ++refused_ < kTries ? Next::later : Next::fails;
  }
  auto done = static_cast<std::size_t>(result);
  // The rest must begin at an aligned position, so bytes after the last one are transferred again.
  if (done < rest_.bytes) done -= done % alignment_;
  if (done == 0) {
    const bool reading = direction_ == Direction::read;
    code_ = reading ? 0 : EIO;
    return (reading && result == 0) || ++short_of_a_block_ == kShortTries ? Next::fails : Next::again;
  }
  refused_ = short_of_a_block_ = 0;
  rest_.memory = static_cast<char*>(rest_.memory) + done;
  rest_.bytes -= done;
  rest_.offset += done;
  return rest_.bytes == 0 ? Next::ends : Next::again;
}

std::optional<Block> Cutter::next() {
  if (start_ == whole_.bytes) return std::nullopt;
  const std::size_t start = start_;
  start_ += std::min(block_, whole_.bytes - start);
  return Block(
      direction_,
      {whole_.file, static_cast<char*>(whole_.memory) + start, start_ - start, whole_.offset + start},
      alignment_);
}

void note_failure(std::optional<TransferFailure>& first, const TransferFailure& failure) {
  if (!first || failure.offset < first->offset) first = failure;
}

DiskPool::DiskPool() : process_(getpid()) {}

bool DiskPool::forked() const { return process_ != getpid(); }

std::optional<TransferFailure> DiskPool::transfer(Direction direction, const Transfer& transfer,
                                                  std::size_t alignment) {
  if (forked())
    throw std::logic_error("a DiskPool cannot be used in the child of a fork; make a new one there");
  return run(direction, transfer, alignment);
}

}  // namespace lightning_zero
