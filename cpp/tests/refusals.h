// System calls that the kernel refuses to a thread, as in a sandbox or at a limit of the system.
#pragma once

#ifdef __linux__

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace lightning_zero {

struct Refusal {
  long call;
  int error;                // 0: the call does nothing and returns 0
  int argument = -1;        // if this is not negative, only calls are refused in which the argument of this
  std::uint32_t value = 0;  // number has this value (its lower 32 bits)
};

// Numbers that headers older than the kernel lack.
constexpr long kRingSetup = 425, kRingEnter = 426, kClone3 = 435;

// No thread can be made.
inline const std::vector<Refusal> kNoThreads = {{SYS_clone, EAGAIN}, {kClone3, EAGAIN}};

// Refuses calls of this thread, until it ends. Returns whether the system can do that; no privilege is
// needed.
inline bool refuse(const Refusal& refusal) {
  constexpr std::size_t lower = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 4 : 0;
  const bool any = refusal.argument < 0;
  const std::size_t place =
      any ? offsetof(seccomp_data, nr)
          : offsetof(seccomp_data, args) + static_cast<std::size_t>(refusal.argument) * 8 + lower;
  const auto call = static_cast<std::uint32_t>(refusal.call);
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(place)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, any ? call : refusal.value, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<std::uint32_t>(refusal.error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof rules / sizeof *rules, rules};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Runs `body` in a thread of its own to which calls are refused: the refusals end with the thread, and the
// process goes on without them. Returns whether the system can refuse calls; `body` does not run otherwise.
template <class Body>
bool with_refusals(const std::vector<Refusal>& refusals, Body body) {
  bool able = true;
  std::thread thread([&] {
    for (const Refusal& refusal : refusals) able = able && refuse(refusal);
    if (able) body();
  });
  thread.join();
  return able;
}

}  // namespace lightning_zero

#endif
