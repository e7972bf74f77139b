#include "collectives.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <set>
#include <thread>

#include "device.h"
#include "kernels.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A device runs whether its host waits or not. Here tasks run when the host calls, and another rank's host
// may be waiting, in a collective, for one that this rank has enqueued: it runs here once the host sleeps,
// for it may be waiting for that other rank. Each group's collectives have a thread of their own: ranks may
// come to those of two groups in another order.
class Progress {
 public:
  void expect(const SignalPtr& signal) {
    std::lock_guard<std::mutex> lock(mutex_);
    expected_.push_back(signal);
    if (!started_) std::thread([this] { look(); }).detach();
    started_ = true;
    changed_.notify_one();
  }

 private:
  static constexpr auto kLook = std::chrono::milliseconds(1);
  static constexpr int kLooks = 4;  // at which it sleeps, one after the other
  // Asleep are also threads that run for less than this part of the time: one that waits for Python's lock,
  // which the host may keep while it waits, wakes up every 5 ms.
  static constexpr double kAwake = 0.1;

  void look() {
    using Clock = std::chrono::steady_clock;
    scheduler().not_a_host();
    HostThreads::Seen before;
    Clock::time_point then;
    for (int asleep = 0;;) {
      wait_for_one();
      std::this_thread::sleep_for(kLook);
      const auto seen = scheduler().hosts.look();
      const auto now = Clock::now();
      const std::chrono::nanoseconds passed = now - then;
      const bool awake = double(seen.nanoseconds - before.nanoseconds) >= kAwake * double(passed.count());
      asleep = seen.asleep && !awake ? asleep + 1 : 0;
      before = seen;
      then = now;
      if (asleep >= kLooks) run_first_ones();
    }
  }

  // Returns once there is a collective that has not run, on a stream that no thread is at.
  void wait_for_one() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] {
      std::erase_if(expected_, [](const SignalPtr& signal) { return signal->done.load(); });
      return std::any_of(expected_.begin(), expected_.end(),
                         [this](const SignalPtr& signal) { return !running_.contains(signal->stream); });
    });
  }

  // The first of each stream, unless a thread is at it.
  void run_first_ones() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& signal : expected_) {
      if (signal->done || !running_.insert(signal->stream).second) continue;
      std::thread([this, signal] {
        scheduler().not_a_host();
        scheduler().progress(signal);
        std::lock_guard<std::mutex> lock(mutex_);
        running_.erase(signal->stream);
        changed_.notify_one();
      }).detach();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<SignalPtr> expected_;
  std::set<int> running_;  // streams
  bool started_ = false;
};

Progress& progress() {
  static auto* the = new Progress;
  return *the;
}

// `wait` lets the current stream wait, and not the host. Tensors are kept until then, or until the
// collective's end.
class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, SignalPtr signal, Tensors kept, Tensors results)
      : Work(rank, type), signal_(std::move(signal)), kept_(std::move(kept)), results_(std::move(results)) {}

  ~SimWork() override { release(); }

  bool isCompleted() override { return signal_->done; }
  bool isSuccess() const override { return signal_->done; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {
    if (!scheduler().defects.no_work_waits)
      scheduler().submit(current_stream(), {"wait for a collective", nullptr, {signal_}, nullptr});
    kept_.clear();  // what frees them is behind the wait
  }
  bool wait(std::chrono::milliseconds) override {
    if (opType_ == c10d::OpType::BARRIER) wait_for(signal_, "barrier");
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto stream = stream_at(signal_->stream);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  void release() {
    if (signal_->done) return;
    for (const auto& tensor : kept_) {
      if (tensor.storage().data())
        allocator().recordStream(tensor.storage().data_ptr(), stream_at(signal_->stream));
    }
  }

  SignalPtr signal_;
  Tensors kept_, results_;
};

// Gloo's thread copies the state of the thread that calls it. Of hooks of saved tensors it would need
// Python's lock to count references, while that thread may hold the lock and wait for gloo, in a task that a
// call from Python came to. So these are put aside, by moves, which count none.
class WithoutHooks {
 public:
  WithoutHooks() { std::swap(own(), aside_); }
  ~WithoutHooks() { std::swap(own(), aside_); }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  using Hooks = at::impl::SavedTensorDefaultHooksTLS;
  static Hooks& own() { return const_cast<Hooks&>(at::SavedTensorDefaultHooks::get_tls_state()); }
  Hooks aside_;
};

Tensors seen_all(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(seen(tensor));
  return all;
}

std::vector<Tensors> seen_all(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& list : lists) all.push_back(seen_all(list));
  return all;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const auto& tensor : tensors) bytes += double(tensor.nbytes());
  return bytes;
}

at::Tensor combine(const at::Tensor& one, const at::Tensor& other, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      return one.add(other);
    case c10d::ReduceOp::MAX:
      return one.max(other);
    case c10d::ReduceOp::MIN:
      return one.min(other);
    case c10d::ReduceOp::PRODUCT:
      return one.mul(other);
    default:
      TORCH_CHECK(false, "simccl knows sum, mean, product, minimum and maximum");
  }
}

// Of all ranks' tensors, in rank order; 16-bit values are widened, and rounded once.
at::Tensor reduced(c10d::Backend& inner, const at::Tensor& own, const c10d::ReduceOp& op) {
  const int size = inner.getSize();
  at::Tensor sent = own.contiguous().view({-1}).view(at::kByte);
  at::Tensor all = at::empty({size, sent.numel()}, sent.options());
  at::Tensor flat = all.view({-1});
  inner._allgather_base(flat, sent)->wait();
  const auto dtype = own.scalar_type();
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor total;
  for (int rank = 0; rank < size; rank++) {
    const at::Tensor part = all[rank].view(dtype).view(own.sizes()).to(wide);
    total = rank ? combine(total, part, op) : part;
  }
  if (op == c10d::ReduceOp::AVG)
    total = at::isFloatingType(wide) ? total.div(size) : total.div(size, "floor");
  return total.to(dtype);
}

class SimCCL final : public c10d::Backend {
 public:
  explicit SimCCL(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    auto parts = std::move(parts_);
    parts_.clear();
    TORCH_CHECK(!parts.empty(), "nothing was coalesced");
    Tensors tensors, results;
    double seconds = 0;
    for (const auto& part : parts) {
      tensors.insert(tensors.end(), part.tensors.begin(), part.tensors.end());
      results.insert(results.end(), part.results.begin(), part.results.end());
      seconds += part.seconds;
    }
    return enqueue({"coalesced collectives", c10d::OpType::COALESCED, tensors, results, seconds, [parts] {
                      for (const auto& part : parts) part.run();
                    }});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto run = [inner = inner_, data = seen_all(tensors), op = options.reduceOp]() mutable {
      for (auto& one : data) one.copy_(reduced(*inner, one, op));
    };
    return start(
        {"all-reduce", c10d::OpType::ALLREDUCE, tensors, tensors, network(2 * bytes_of(tensors)), run});
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto run = [inner = inner_, data = seen_all(tensors), options]() mutable {
      inner->broadcast(data, options)->wait();
    };
    return start({"broadcast", c10d::OpType::BROADCAST, tensors, tensors, network(bytes_of(tensors)), run});
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto run = [inner = inner_, here = rank_ == options.rootRank, data = seen_all(tensors),
                op = options.reduceOp]() mutable {
      for (auto& one : data) {
        const auto total = reduced(*inner, one, op);
        if (here) one.copy_(total);
      }
    };
    return start({"reduce", c10d::OpType::REDUCE, tensors, tensors, network(bytes_of(tensors)), run});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto run = [inner = inner_, to = seen_all(outputs), from = seen_all(inputs), options]() mutable {
      inner->allgather(to, from, options)->wait();
    };
    return start({"all-gather", c10d::OpType::ALLGATHER, both(flat(outputs), inputs), flat(outputs),
                  network(bytes_of(flat(outputs))), run});
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(output.numel() == input.numel() * size_, "all-gather: the output has ", output.numel(),
                " elements, the input ", input.numel(), " on each of ", size_, " ranks");
    auto run = [inner = inner_, to = seen(output), from = seen(input), options]() mutable {
      inner->_allgather_base(to, from, options)->wait();
    };
    return start({"all-gather",
                  c10d::OpType::_ALLGATHER_BASE,
                  {output, input},
                  {output},
                  network(output.nbytes()),
                  run});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return together([&] {
      for (size_t i = 0; i < outputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    });
  }

  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    auto run = [inner = inner_, to = seen_all(outputs), from = seen_all(inputs), options]() mutable {
      inner->allgather_coalesced(to, from, options)->wait();
    };
    return start({"all-gather", c10d::OpType::ALLGATHER_COALESCED, both(flat(outputs), inputs), flat(outputs),
                  network(bytes_of(flat(outputs))), run});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * size_, "reduce-scatter: the input has ", input.numel(),
                " elements, the output ", output.numel(), " on each of ", size_, " ranks");
    auto run = [inner = inner_, to = seen(output), from = seen(input), op = options.reduceOp]() mutable {
      const auto total = reduced(*inner, from, op).view({inner->getSize(), -1});
      to.copy_(total[inner->getRank()].view(to.sizes()));
    };
    return start({"reduce-scatter",
                  c10d::OpType::_REDUCE_SCATTER_BASE,
                  {output, input},
                  {output},
                  network(input.nbytes()),
                  run});
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return together([&] {
      for (size_t i = 0; i < outputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    auto run = [inner = inner_, to = seen_all(outputs), from = seen_all(inputs),
                op = options.reduceOp]() mutable {
      for (size_t i = 0; i < to.size(); i++) {
        const auto total = reduced(*inner, at::stack(from[i]), op);
        to[i].copy_(total[inner->getRank()]);
      }
    };
    return start({"reduce-scatter", c10d::OpType::REDUCE_SCATTER, both(outputs, flat(inputs)), outputs,
                  network(bytes_of(flat(inputs))), run});
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto run = [inner = inner_, to = seen(output), from = seen(input), output_sizes, input_sizes,
                options]() mutable {
      inner->alltoall_base(to, from, output_sizes, input_sizes, options)->wait();
    };
    return start(
        {"all-to-all", c10d::OpType::ALLTOALL_BASE, {output, input}, {output}, network(input.nbytes()), run});
  }

  // Gloo has only the one of flat tensors.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto run = [inner = inner_, to = seen_all(outputs), from = seen_all(inputs), options]() mutable {
      std::vector<int64_t> output_sizes, input_sizes;
      Tensors sent;
      for (const auto& part : from) {
        input_sizes.push_back(part.numel());
        sent.push_back(part.reshape({-1}));
      }
      int64_t total = 0;
      for (const auto& part : to) {
        output_sizes.push_back(part.numel());
        total += part.numel();
      }
      at::Tensor input = at::cat(sent), output = at::empty({total}, to[0].options());
      const auto sizes = output_sizes;  // which gloo takes
      inner->alltoall_base(output, input, output_sizes, input_sizes, options)->wait();
      const auto parts = output.split_with_sizes(sizes);
      for (size_t i = 0; i < to.size(); i++) to[i].copy_(parts[i].view(to[i].sizes()));
    };
    return start({"all-to-all", c10d::OpType::ALLTOALL, both(outputs, inputs), outputs,
                  network(bytes_of(inputs)), run});
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto run = [inner = inner_, data = seen_all(tensors), to, tag]() mutable {
      inner->send(data, to, tag)->wait();
    };
    return start({"send", c10d::OpType::SEND, tensors, {}, network(bytes_of(tensors)), run});
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto run = [inner = inner_, data = seen_all(tensors), from, tag]() mutable {
      inner->recv(data, from, tag)->wait();
    };
    return start({"receive", c10d::OpType::RECV, tensors, tensors, network(bytes_of(tensors)), run});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start({"barrier", c10d::OpType::BARRIER, {}, {}, network(0), [inner = inner_, options] {
                    inner->barrier(options)->wait();
                  }});
  }

 private:
  struct Part {
    std::string name;
    c10d::OpType type;
    Tensors tensors, results;
    double seconds;
    std::function<void()> run;
  };

  static Tensors both(Tensors one, const Tensors& other) {
    one.insert(one.end(), other.begin(), other.end());
    return one;
  }

  double network(double bytes) const {
    const auto& costs = scheduler().costs;
    return costs.latency + bytes * (size_ - 1) / size_ / costs.network;
  }

  template <typename Calls>
  WorkPtr together(const Calls& calls) {
    if (coalescing_) {
      calls();
      return nullptr;
    }
    startCoalescing();
    calls();
    return endCoalescing();
  }

  WorkPtr start(Part part) {
    for (const auto& tensor : part.tensors) {
      TORCH_CHECK(on_device(tensor), part.name, ": a tensor is on ", tensor.device(),
                  ", not on the simulated device");
      TORCH_CHECK(tensor.is_contiguous(), part.name, ": Tensors must be contiguous");
    }
    sequence_++;
    if (!coalescing_) return enqueue(std::move(part));
    parts_.push_back(std::move(part));
    return nullptr;
  }

  // In a stream of this group's own, after what the caller's stream has to do so far.
  WorkPtr enqueue(Part part) {
    c10::DeviceGuard guard(part.tensors.empty() ? c10::Device(kType, current_device())
                                                : part.tensors[0].device());
    const auto before = scheduler().record(current_stream());
    auto signal = std::make_shared<Signal>();
    {
      const auto stream = own_stream();
      if (!scheduler().defects.no_caller_waits)
        scheduler().submit(index_of(stream), {"wait for the caller", nullptr, {before}, nullptr});
      c10::StreamGuard on_stream(stream);
      signal = launch(part.name, Resource::network, part.seconds, [run = std::move(part.run)]() mutable {
        const WithoutHooks guard;
        run();
      });
    }
    progress().expect(signal);
    return c10::make_intrusive<SimWork>(rank_, part.type, signal, part.tensors, part.results);
  }

  c10::Stream own_stream() {
    const auto device = current_device();
    auto found = streams_.find(device);
    if (found == streams_.end()) {
      const auto made = c10::impl::VirtualGuardImpl(kType).getNewStream(c10::Device(kType, device));
      found = streams_.emplace(device, made).first;
    }
    return found->second;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::map<int, c10::Stream> streams_;
  uint64_t sequence_ = 0;
  bool coalescing_ = false;
  std::vector<Part> parts_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> inner) {
  return c10::make_intrusive<SimCCL>(std::move(inner));
}

}  // namespace sim
