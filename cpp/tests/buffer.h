// Memory between guards.
#pragma once

#include <gtest/gtest.h>

#if defined(__has_include) && __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lightning_zero {

// `count` elements of `item` bytes that begin `offset` elements after an address aligned to a cache line. The
// address sanitizer detects every access outside. The guards are also checked at the end, for builds without
// it and for stores that bypass the caches, which it does not see.
class Buffer {
 public:
  Buffer(std::size_t item, std::size_t count, std::size_t offset = 0)
      : item_(item), count_(count), memory_(2 * kGuard + kLine + (count + offset) * item, kPattern) {
    const std::size_t past_line = reinterpret_cast<std::uintptr_t>(memory_.data()) % kLine;
    before_ = kLine - past_line + kGuard + offset * item;
    std::memset(data(), 0, bytes());
    ASAN_POISON_MEMORY_REGION(memory_.data(), before_);
    ASAN_POISON_MEMORY_REGION(memory_.data() + before_ + bytes(), after());
  }
  ~Buffer() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.data(), memory_.size());
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    EXPECT_TRUE(std::all_of(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(before_), intact))
        << "written before the array";
    EXPECT_TRUE(std::all_of(memory_.end() - static_cast<std::ptrdiff_t>(after()), memory_.end(), intact))
        << "written after the array";
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  unsigned char* data() { return memory_.data() + before_; }
  const unsigned char* data() const { return memory_.data() + before_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * item_; }

  std::uint32_t bits(std::size_t i) const {
    std::uint32_t value = 0;
    std::memcpy(&value, data() + i * item_, item_);  // little-endian, as are all the targets
    return value;
  }
  void set_bits(std::size_t i, std::uint32_t value) { std::memcpy(data() + i * item_, &value, item_); }

 private:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kGuard = 64;  // at least the widest vector
  static constexpr unsigned char kPattern = 0xA5;

  std::size_t after() const { return memory_.size() - before_ - bytes(); }

  const std::size_t item_;
  const std::size_t count_;
  std::vector<unsigned char> memory_;
  std::size_t before_ = 0;
};

}  // namespace lightning_zero
