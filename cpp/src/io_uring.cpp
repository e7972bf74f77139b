// Rings of the Linux kernel, by system calls without liburing.
//
// The interface is documented in the manual pages io_uring(7), io_uring_setup(2) and io_uring_enter(2). It is
// part of the kernel's stable ABI, and declared here because the headers of the build machine are often older
// than the kernel that runs the binary.
#include <cerrno>
#include <system_error>

#include "lightning_zero/disk_rings.h"

#ifdef __linux__

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define LIGHTNING_ZERO_IO_URING_HEADER
#endif

namespace lightning_zero {
namespace {

namespace abi {

#ifdef __alpha__
constexpr long kSetup = 535, kEnter = 536;
#else
constexpr long kSetup = 425, kEnter = 426;
#endif
constexpr off_t kRingsOffset = 0, kEntriesOffset = 0x10000000;  // for mmap
constexpr unsigned kGetEvents = 1;                              // for io_uring_enter
constexpr std::uint8_t kNop = 0, kRead = 22, kWrite = 23;       // operations
// Features: one mapping contains both rings; completions without room are kept; and one that Linux 5.6
// introduced together with reads and writes of plain buffers.
constexpr std::uint32_t kSingleMapping = 1, kNoDrop = 2, kCurrentPosition = 8;
constexpr std::uint32_t kNeeded = kSingleMapping | kNoDrop | kCurrentPosition;

struct Request {
  std::uint8_t operation, flags;
  std::uint16_t priority;
  std::int32_t file;
  std::uint64_t offset;
  std::uint64_t address;
  std::uint32_t bytes;
  std::uint32_t operation_flags;
  std::uint64_t tag;
  std::uint64_t unused[3];
};

struct Completion {
  std::uint64_t tag;
  std::int32_t result;
  std::uint32_t flags;
};

struct RequestOffsets {
  std::uint32_t head, tail, mask, entries, flags, dropped, array, unused;
  std::uint64_t user_address;
};

struct CompletionOffsets {
  std::uint32_t head, tail, mask, entries, overflow, completions, flags, unused;
  std::uint64_t user_address;
};

struct Parameters {
  std::uint32_t requests, completions, flags, thread_core, thread_idle, features, workers, unused[3];
  RequestOffsets request_offsets;
  CompletionOffsets completion_offsets;
};

static_assert(sizeof(Request) == 64 && sizeof(Completion) == 16 && sizeof(Parameters) == 120);
#ifdef LIGHTNING_ZERO_IO_URING_HEADER
static_assert(sizeof(Request) == sizeof(io_uring_sqe) && sizeof(Completion) == sizeof(io_uring_cqe) &&
              sizeof(Parameters) == sizeof(io_uring_params));
static_assert(offsetof(Request, file) == offsetof(io_uring_sqe, fd) &&
              offsetof(Request, offset) == offsetof(io_uring_sqe, off) &&
              offsetof(Request, address) == offsetof(io_uring_sqe, addr) &&
              offsetof(Request, bytes) == offsetof(io_uring_sqe, len) &&
              offsetof(Request, tag) == offsetof(io_uring_sqe, user_data) &&
              offsetof(Completion, result) == offsetof(io_uring_cqe, res));
static_assert(offsetof(RequestOffsets, array) == offsetof(io_sqring_offsets, array) &&
              offsetof(CompletionOffsets, completions) == offsetof(io_cqring_offsets, cqes) &&
              offsetof(Parameters, request_offsets) == offsetof(io_uring_params, sq_off) &&
              offsetof(Parameters, completion_offsets) == offsetof(io_uring_params, cq_off));
static_assert(kNop == IORING_OP_NOP && kGetEvents == IORING_ENTER_GETEVENTS &&
              kRingsOffset == IORING_OFF_SQ_RING && kEntriesOffset == IORING_OFF_SQES);
#endif

}  // namespace abi

constexpr std::size_t kMostBytes = std::size_t{1} << 30;  // per request, whose length has 32 bits

[[noreturn]] void refuse(int code, const char* what) {
  throw std::system_error(code, std::system_category(), what);
}

class Descriptor {
 public:
  explicit Descriptor(int file) : file_(file) {}
  ~Descriptor() { ::close(file_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return file_; }

 private:
  const int file_;
};

class Mapping {
 public:
  Mapping(int file, off_t offset, std::size_t bytes)
      : bytes_(bytes),
        memory_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, offset)) {
    if (memory_ == MAP_FAILED) refuse(errno, "mmap of a ring");
  }
  ~Mapping() { ::munmap(memory_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + offset);
  }

 private:
  const std::size_t bytes_;
  void* const memory_;
};

int set_up(std::size_t requests, abi::Parameters* parameters) {
  const long file = ::syscall(abi::kSetup, static_cast<unsigned>(requests), parameters);
  if (file < 0) {
    const bool locked = errno == ENOMEM;
    refuse(errno, locked ? "io_uring_setup (before Linux 5.12 a ring counts towards RLIMIT_MEMLOCK)"
                         : "io_uring_setup");
  }
  return static_cast<int>(file);  // the kernel sets close-on-exec
}

// The process and the kernel synchronize by the heads and tails of the queues only. The side that moves one
// stores it with release semantics after writing the entries; the other side loads it with acquire semantics
// before reading them.
std::uint32_t load(const std::uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(std::uint32_t* word, std::uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

class KernelRing : public Ring {
 public:
  explicit KernelRing(std::size_t requests)
      : file_(set_up(requests, &parameters_)),
        rings_(file_.get(), abi::kRingsOffset, ring_bytes(able(parameters_))),
        entries_(file_.get(), abi::kEntriesOffset, parameters_.requests * sizeof(abi::Request)) {
    const abi::RequestOffsets& of_requests = parameters_.request_offsets;
    request_head_ = rings_.at<std::uint32_t>(of_requests.head);
    request_tail_ = rings_.at<std::uint32_t>(of_requests.tail);
    request_mask_ = *rings_.at<std::uint32_t>(of_requests.mask);
    const abi::CompletionOffsets& of_completions = parameters_.completion_offsets;
    completion_head_ = rings_.at<std::uint32_t>(of_completions.head);
    completion_tail_ = rings_.at<std::uint32_t>(of_completions.tail);
    completion_mask_ = *rings_.at<std::uint32_t>(of_completions.mask);
    completions_ = rings_.at<abi::Completion>(of_completions.completions);
    // The kernel finds requests by their numbers in this array; entry i always refers to request i.
    auto* numbers = rings_.at<std::uint32_t>(of_requests.array);
    for (std::uint32_t place = 0; place < parameters_.requests; ++place) numbers[place] = place;
    try_out();
  }

  void push(Direction direction, const Transfer& transfer, std::size_t tag) override {
    abi::Request request{};
    request.operation = direction == Direction::read ? abi::kRead : abi::kWrite;
    request.file = transfer.file;
    request.offset = transfer.offset;
    request.address = reinterpret_cast<std::uintptr_t>(transfer.memory);
    request.bytes = static_cast<std::uint32_t>(std::min(transfer.bytes, kMostBytes));
    request.tag = tag;
    put(request);
  }

  int submit() override {
    const std::uint32_t waiting = *request_tail_ - load(request_head_);
    const long submitted = ::syscall(abi::kEnter, file_.get(), waiting, 1U, abi::kGetEvents, nullptr, 0);
    return submitted < 0 ? -errno : static_cast<int>(submitted);
  }

  bool pop(Completion* completion) override {
    const std::uint32_t head = *completion_head_;
    if (head == load(completion_tail_)) return false;
    const abi::Completion& found = completions_[head & completion_mask_];
    *completion = {static_cast<std::size_t>(found.tag), found.result};
    store(completion_head_, head + 1);  // now the kernel may overwrite the entry
    return true;
  }

  // Safe, since the kernel reads the tail only during `submit` (there is no polling kernel thread).
  void withdraw() override { store(request_tail_, load(request_head_)); }

 private:
  static const abi::Parameters& able(const abi::Parameters& parameters) {
    if ((parameters.features & abi::kNeeded) != abi::kNeeded) refuse(ENOSYS, "io_uring of Linux before 5.6");
    return parameters;
  }

  static std::size_t ring_bytes(const abi::Parameters& parameters) {
    const std::size_t requests =
        parameters.request_offsets.array + parameters.requests * sizeof(std::uint32_t);
    const std::size_t completions =
        parameters.completion_offsets.completions + parameters.completions * sizeof(abi::Completion);
    return std::max(requests, completions);
  }

  void put(const abi::Request& request) {
    const std::uint32_t tail = *request_tail_;
    *entries_.at<abi::Request>((tail & request_mask_) * sizeof(abi::Request)) = request;
    store(request_tail_, tail + 1);
  }

  // A sandbox may allow a program to make a ring but not to use it.
  void try_out() {
    abi::Request nothing{};
    nothing.operation = abi::kNop;
    put(nothing);
    for (Completion completion{}; !pop(&completion);) {
      const int submitted = submit();
      if (submitted <= 0 && submitted != -EINTR)
        refuse(submitted < 0 ? -submitted : ENOSYS, "io_uring_enter");
    }
  }

  abi::Parameters parameters_{};
  const Descriptor file_;
  const Mapping rings_;
  const Mapping entries_;
  const std::uint32_t* request_head_;
  std::uint32_t* request_tail_;
  std::uint32_t request_mask_;
  std::uint32_t* completion_head_;
  const std::uint32_t* completion_tail_;
  std::uint32_t completion_mask_;
  const abi::Completion* completions_;
};

}  // namespace

std::unique_ptr<Ring> make_kernel_ring(std::size_t requests) {
  return std::make_unique<KernelRing>(requests);
}

#else

namespace lightning_zero {

std::unique_ptr<Ring> make_kernel_ring(std::size_t) {
  throw std::system_error(ENOSYS, std::system_category(), "io_uring exists on Linux only");
}

#endif

std::string io_uring_refusal() {
  try {
    make_kernel_ring(1);
    return "";
  } catch (const std::system_error& error) {
    return error.what();
  }
}

}  // namespace lightning_zero
