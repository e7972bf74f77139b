// Division of an array's elements among threads.
#pragma once

#include <algorithm>
#include <cstddef>

#include "lightning_zero/floating_point.h"
#include "lightning_zero/thread_pool.h"

namespace lightning_zero {

// Calls `work(start, count)` for consecutive pieces of `count` elements, on up to `threads` threads, each in
// the floating-point environment of kernels.
template <class Work>
void for_pieces(std::size_t count, std::size_t threads, const Work& work) {
  constexpr std::size_t kPiece = std::size_t{1} << 18;
  parallel_for((count + kPiece - 1) / kPiece, threads, [&](std::size_t i) {
    const DefaultFloatingPoint environment;
    const std::size_t start = i * kPiece;
    work(start, std::min(kPiece, count - start));
  });
}

}  // namespace lightning_zero
