// Streams, events and tasks of the simulated device, and the one scheduler that runs them.
//
// Tasks of one stream run in order; tasks of several run in any order that events allow:
//   eager   at once
//   lazy    when somebody waits, and then only what is waited for
//   random  at times that the seed draws: some streams starve until they are waited for, others run at once
// Each task has a cost. Virtual time follows from the order of the calls, so that it is the same in every
// schedule.

#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 4;
constexpr int kStreams = 33;  // of a device; the first is the default one
constexpr int kAllStreams = kDevices * kStreams;

enum class Mode { eager, lazy, random };

// What serves one task at a time; `none` serves any number.
enum class Resource { none, compute, to_device, to_host, network };
constexpr int kResources = 5;

// One recording of an event.
struct Signal {
  std::atomic<bool> done{false};
  int stream = -1;
  double time = 0;  // virtual seconds
};
using SignalPtr = std::shared_ptr<Signal>;

struct Task {
  std::string name;
  std::function<void()> run;
  std::vector<SignalPtr> waits;
  SignalPtr records;
  bool poisons = false;
  Resource resource = Resource::none;
  double seconds = 0;
  bool fails = false;
  bool hangs = false;
};

// A task in virtual time.
struct Span {
  std::string name;
  int stream;
  Resource resource;
  double start, end;
};

// A fault that waits for the `skip`-th task whose name begins with `name`.
struct Fault {
  std::string name;
  int64_t skip;
  bool hangs;
};

// The rates of the virtual clock: per second, and seconds.
struct CostModel {
  double flops = 50e12;
  double memory = 1.5e12;  // bytes of the device's own memory
  double to_device = 25e9, to_host = 25e9;
  double network = 25e9;
  double launch = 5e-6;   // of the device, per task
  double latency = 2e-5;  // of a collective
};

// Properties that a test breaks on purpose, to see that another test notices.
struct Defects {
  bool no_poison = false;
  bool no_events = false;          // a recorded event is done at once
  bool no_copy_waits = false;      // a blocking copy returns at once
  bool no_record_stream = false;   // what other streams use is given out again at once
  bool no_pinned_care = false;     // freed pinned memory is given back under a copy
  bool no_unpin_check = false;     // memory may be unpinned under a copy
  bool no_limit = false;           // memory does not run out
  bool no_pageable_count = false;  // copies of memory that is not pinned go unnoticed
  bool no_wait_count = false;      // so do the host's waits
  bool no_time = false;            // tasks cost nothing
  bool no_caller_waits = false;    // a collective does not wait for the caller's stream
  bool no_work_waits = false;      // nor the caller's stream for the collective
};

// The threads that give tasks to the device.
class HostThreads {
 public:
  struct Seen {
    bool asleep = false;       // all of them
    int64_t nanoseconds = -1;  // that they have run so far
  };

  // The calling thread is one.
  void note();
  // A thread of this number is not one any more: another that gets the number may never sleep.
  void forget(int thread);
  // Their state, from what the system says.
  Seen look();

 private:
  std::mutex mutex_;
  std::vector<int> threads_;
};

class Scheduler {
 public:
  void configure(Mode mode, uint64_t seed);
  void submit(int stream, Task task);
  SignalPtr record(int stream);
  // For callers that have the allocator's lock: these run no task but poison, and events that have nothing
  // before them.
  void submit_poison(int stream, std::string name, std::function<void()> run);
  SignalPtr record_alone(int stream);
  // With random schedules, a device goes on whenever the host calls it.
  void go_on();
  // Runs what has to run before the signal is done; raises what tasks before have raised.
  void finish(const SignalPtr& signal);
  void finish_all();
  // The same without an error, which waits for the host.
  void progress(const SignalPtr& signal);
  bool idle(int stream);
  size_t pending();

  void add_fault(Fault fault);
  void clear_faults();
  void set_hang_limit(double seconds) { hang_limit_ = seconds; }

  // The virtual clock of the host: threads share it, but for those that have one of their own.
  double now() const;
  void host_works(double seconds);
  void host_reaches(double time);
  // The calling thread has a clock of its own from now on, which shows `time`.
  void host_apart(double time);
  // Whether the host sees that a task has ended: with `clocked`, only once its clock has reached that.
  bool seen_done(const Signal& signal) const { return signal.done && (!clocked || signal.time <= now()); }
  std::atomic<bool> clocked{false};
  void reset_clock();
  void trace(bool on);
  std::vector<Span> spans();

  // The calling thread gives no tasks, although it may run some.
  void not_a_host();

  CostModel costs;
  Defects defects;
  HostThreads hosts;

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool ready(int stream) const;
  // Tasks run without the lock: one that waits for other processes must not keep the host from going on.
  void run_head(int stream, Lock& lock);
  void run_poison(int stream, Lock& lock);
  void run_freely(Lock& lock);
  void run_toward(const SignalPtr& signal, Lock& lock);
  void run_until(const SignalPtr& signal, Lock& lock);
  void submit(int stream, Task task, Lock& lock);
  void plan(int stream, Task& task);
  void draw_pace(int stream);
  void raise_errors();
  double& host_time();
  double chance() { return double(random_() >> 11) * 0x1p-53; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<std::deque<Task>, kAllStreams> queues_;
  std::array<bool, kAllStreams> busy_{};  // a thread runs its task
  Mode mode_ = Mode::eager;
  std::mt19937_64 random_{0};
  std::array<double, kAllStreams> pace_{};  // how likely a stream's next task runs, of `random`
  std::vector<std::string> errors_;         // of tasks; raised at the next wait
  std::vector<Fault> faults_;
  double hang_limit_ = 60;

  double host_time_ = 0;
  std::array<double, kAllStreams> stream_time_{};
  std::array<std::array<double, kResources>, kDevices> resource_time_{};
  bool tracing_ = false;
  std::vector<Span> spans_;
};

Scheduler& scheduler();

}  // namespace sim
