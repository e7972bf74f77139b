#include "scheduler.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <thread>

namespace sim {
namespace {

// The thread is known to `HostThreads`, until it ends, or is to stay unknown.
struct Noted {
  HostThreads* by = nullptr;
  bool stays_unknown = false;
  ~Noted() {
    if (by) by->forget(int(gettid()));
    stays_unknown = true;
  }
};

thread_local Noted noted;
thread_local int running = 0;      // tasks that the thread is in
thread_local bool apart = false;   // the thread has a clock of its own,
thread_local double own_time = 0;  // which shows this

}  // namespace

void HostThreads::note() {
  if (noted.by || noted.stays_unknown) return;
  noted.by = this;
  std::lock_guard<std::mutex> lock(mutex_);
  threads_.push_back(int(gettid()));
}

void HostThreads::forget(int thread) {
  std::lock_guard<std::mutex> lock(mutex_);
  threads_.erase(std::remove(threads_.begin(), threads_.end(), thread), threads_.end());
}

HostThreads::Seen HostThreads::look() {
  std::lock_guard<std::mutex> lock(mutex_);
  Seen seen{true, 0};
  for (const int thread : threads_) {
    const std::string folder = "/proc/self/task/" + std::to_string(thread);
    std::string stat;
    int64_t ran = 0;
    if (!std::getline(std::ifstream(folder + "/stat"), stat)) continue;  // it is ending
    std::ifstream(folder + "/schedstat") >> ran;
    const auto name_ends = stat.rfind(')');
    seen.asleep &= name_ends + 2 < stat.size() && stat[name_ends + 2] == 'S';
    seen.nanoseconds += ran;
  }
  return seen;
}

void Scheduler::not_a_host() { noted.stays_unknown = true; }

Scheduler& scheduler() {
  static auto* the = new Scheduler;  // tensors may outlive static objects
  return *the;
}

void Scheduler::configure(Mode mode, uint64_t seed) {
  finish_all();
  Lock lock(mutex_);
  mode_ = mode;
  random_.seed(seed);
  for (int stream = 0; stream < kAllStreams; stream++) draw_pace(stream);
}

// Few seeds are to show most faults: what races is late on one side and early on the other, so half of the
// streams starve or run at once, and every now and then one changes.
void Scheduler::draw_pace(int stream) {
  constexpr double kinds[] = {0.0, 0.0, 0.2, 0.7, 1.0, 1.0};
  pace_[stream] = kinds[random_() % 6];
}

bool Scheduler::ready(int stream) const {
  const auto& queue = queues_[stream];
  if (queue.empty() || queue.front().hangs || busy_[stream]) return false;
  const auto& waits = queue.front().waits;
  return std::all_of(waits.begin(), waits.end(), [](const SignalPtr& signal) { return signal->done.load(); });
}

void Scheduler::run_head(int stream, Lock& lock) {
  Task task = std::move(queues_[stream].front());
  queues_[stream].pop_front();
  busy_[stream] = true;
  lock.unlock();
  std::string error;
  running++;
  try {
    TORCH_CHECK(!task.fails, "an injected fault");
    if (task.run) task.run();
  } catch (const c10::Error& caught) {
    error = task.name + ": " + caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    error = task.name + ": " + caught.what();
  }
  running--;
  task.run = nullptr;  // whatever it holds is freed without the lock, too
  lock.lock();
  if (!error.empty()) errors_.push_back(error);
  busy_[stream] = false;
  if (task.records) task.records->done = true;
  changed_.notify_all();
  run_poison(stream, lock);
}

// Memory that was freed is overwritten as soon as its stream allows.
void Scheduler::run_poison(int stream, Lock& lock) {
  while (ready(stream) && queues_[stream].front().poisons) run_head(stream, lock);
}

void Scheduler::run_freely(Lock& lock) {
  if (random_() % 64 == 0) draw_pace(int(random_() % kAllStreams));
  if (random_() % 32 == 0) draw_pace(int(random_() % kDevices) * kStreams);
  const int first = int(random_() % kAllStreams);
  for (int offset = 0; offset < kAllStreams; offset++) {
    const int stream = (first + offset) % kAllStreams;
    while (ready(stream) && chance() < pace_[stream]) run_head(stream, lock);
  }
}

void Scheduler::submit(int stream, Task task) {
  hosts.note();
  Lock lock(mutex_);
  submit(stream, std::move(task), lock);
}

void Scheduler::submit(int stream, Task task, Lock& lock) {
  plan(stream, task);
  queues_[stream].push_back(std::move(task));
  if (mode_ == Mode::eager)
    while (ready(stream)) run_head(stream, lock);
  run_poison(stream, lock);
  if (mode_ == Mode::random) run_freely(lock);
}

// Its place in virtual time, and the fault that was kept for it.
void Scheduler::plan(int stream, Task& task) {
  if (defects.no_time) task.seconds = 0;
  const int device = stream / kStreams;
  double start = std::max(stream_time_[stream], host_time());
  for (const auto& signal : task.waits) start = std::max(start, signal->time);
  double* resource = &resource_time_[device][int(task.resource)];
  if (task.resource != Resource::none) {
    start = std::max(start, *resource);
    *resource = start + task.seconds;
  }
  stream_time_[stream] = start + task.seconds;
  if (task.records) {
    task.records->stream = stream;
    task.records->time = stream_time_[stream];
  }
  if (tracing_ && task.seconds > 0) {
    spans_.push_back({task.name, stream, task.resource, start, stream_time_[stream]});
  }
  for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
    if (task.name.rfind(fault->name, 0) != 0 || fault->skip-- > 0) continue;
    (fault->hangs ? task.hangs : task.fails) = true;
    faults_.erase(fault);
    break;
  }
}

void Scheduler::submit_poison(int stream, std::string name, std::function<void()> run) {
  hosts.note();
  Lock lock(mutex_);
  queues_[stream].push_back({std::move(name), std::move(run), {}, nullptr, true});
  run_poison(stream, lock);
}

SignalPtr Scheduler::record_alone(int stream) {
  auto signal = std::make_shared<Signal>();
  hosts.note();
  Lock lock(mutex_);
  Task task{"record an event", nullptr, {}, signal};
  plan(stream, task);
  queues_[stream].push_back(std::move(task));
  while (mode_ != Mode::lazy && ready(stream) &&
         (queues_[stream].front().poisons || !queues_[stream].front().run))
    run_head(stream, lock);
  return signal;
}

void Scheduler::go_on() {
  Lock lock(mutex_);
  if (mode_ == Mode::random) run_freely(lock);
}

SignalPtr Scheduler::record(int stream) {
  auto signal = std::make_shared<Signal>();
  submit(stream, {"record an event", nullptr, {}, signal});
  return signal;
}

// Runs one task that the signal needs, or waits for a thread that does.
void Scheduler::run_toward(const SignalPtr& signal, Lock& lock) {
  int stream = signal->stream;
  for (;;) {
    auto& queue = queues_[stream];
    if (busy_[stream]) {
      changed_.wait_for(lock, std::chrono::milliseconds(100));
      return;
    }
    TORCH_CHECK(!queue.empty(), "deadlock: a stream waits for an event that nobody will record");
    if (queue.front().hangs) {
      const std::string name = queue.front().name;
      const auto going_on = [&] { return queue.empty() || !queue.front().hangs; };
      TORCH_CHECK(changed_.wait_for(lock, std::chrono::duration<double>(hang_limit_), going_on),
                  "a stream of the simulated device has not ended \"", name, "\" within ", hang_limit_, " s");
      return;
    }
    const auto& waits = queue.front().waits;
    auto needed = std::find_if(waits.begin(), waits.end(), [](const SignalPtr& one) { return !one->done; });
    if (needed == waits.end()) return run_head(stream, lock);
    stream = (*needed)->stream;
  }
}

void Scheduler::run_until(const SignalPtr& signal, Lock& lock) {
  TORCH_CHECK(!running || signal->done, "a task of the simulated device waits for its device, which runs it");
  while (!signal->done) {
    if (mode_ == Mode::random && chance() < 0.5) run_freely(lock);
    if (!signal->done) run_toward(signal, lock);
  }
}

void Scheduler::finish(const SignalPtr& signal) {
  Lock lock(mutex_);
  run_until(signal, lock);
  raise_errors();
}

// Not `run_until`: its free choice may take a collective that other ranks come to after this one, and wait
// for them.
void Scheduler::progress(const SignalPtr& signal) {
  Lock lock(mutex_);
  while (!signal->done) run_toward(signal, lock);
}

void Scheduler::finish_all() {
  for (int stream = 0; stream < kAllStreams; stream++)
    if (!idle(stream)) finish(record(stream));
  Lock lock(mutex_);
  raise_errors();
}

void Scheduler::raise_errors() {
  if (errors_.empty()) return;
  const std::string text = errors_.front();
  errors_.clear();
  TORCH_CHECK(false, "on the simulated device: ", text);
}

bool Scheduler::idle(int stream) {
  Lock lock(mutex_);
  return queues_[stream].empty() && !busy_[stream];
}

size_t Scheduler::pending() {
  Lock lock(mutex_);
  return std::accumulate(queues_.begin(), queues_.end(), size_t(0),
                         [](size_t sum, const auto& queue) { return sum + queue.size(); });
}

void Scheduler::add_fault(Fault fault) {
  Lock lock(mutex_);
  faults_.push_back(std::move(fault));
}

void Scheduler::clear_faults() {
  Lock lock(mutex_);
  faults_.clear();
  errors_.clear();
  for (auto& queue : queues_)
    for (auto& task : queue) task.hangs = task.fails = false;
  changed_.notify_all();
}

double Scheduler::now() const { return apart ? own_time : host_time_; }

double& Scheduler::host_time() { return apart ? own_time : host_time_; }

void Scheduler::host_works(double seconds) {
  Lock lock(mutex_);
  host_time() += seconds;
}

void Scheduler::host_reaches(double time) {
  Lock lock(mutex_);
  host_time() = std::max(host_time(), time);
}

void Scheduler::host_apart(double time) {
  apart = true;
  own_time = time;
}

void Scheduler::reset_clock() {
  finish_all();  // signals that are still to come would carry times of the clock before
  Lock lock(mutex_);
  host_time_ = 0;
  stream_time_ = {};
  resource_time_ = {};
  spans_.clear();
}

void Scheduler::trace(bool on) {
  Lock lock(mutex_);
  tracing_ = on;
}

std::vector<Span> Scheduler::spans() {
  Lock lock(mutex_);
  return spans_;
}

}  // namespace sim
