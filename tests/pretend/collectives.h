// Ranks with pretend devices: a c10d backend that queues gloo's collectives on the caller's current stream, as NCCL
// does with its own. A collective is issued, not done, when it returns, and waits for missing ranks for ever unless
// the group is aborted. Where links report errors, as sockets do and NVLink does not, its work is completed then, with
// an exception that `wait` raises; its kernel waits on. What NCCL refuses or does wrong, and gloo takes, is refused
// here: `check`. What was issued is remembered, in order, to be compared between ranks.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "memory.h"

namespace pretend {

using Issued = std::tuple<std::string, std::string, int64_t, int, int64_t>;  // what, type, elements, device, stream
inline std::vector<Issued> issued;
inline std::mutex issuing;

inline std::atomic<bool> links_report_errors{false};

class QueuedWork final : public c10d::Work {
 public:
  explicit QueuedWork(Event done, c10::DeviceIndex device) : done_(std::move(done)), device_(device) {}
  bool isCompleted() override { return exception() || done_->query(); }
  void set_exception(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    exception_ = error;
  }
  bool wait(std::chrono::milliseconds) override {  // of the current stream, not of the host
    current_stream(device_)->wait_for(done_);
    if (exception()) std::rethrow_exception(exception());
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  Event done_;
  c10::DeviceIndex device_;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), aborted_(std::make_shared<std::atomic<bool>>(false)) {}
  const std::string getBackendName() const override { return "pretend"; }
  void abort() override { *aborted_ = true; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override {
    check("all_gather", in, out, out);
    return queue(out, [gloo = gloo_, y = on_host(out), x = on_host(in), options]() mutable {
      return gloo->_allgather_base(y, x, options);
    });
  }
  // gloo's own is an all-reduce of a copy, too, whose work does not say when it is completed.
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in,
                                                      const c10d::ReduceScatterOptions& options) override {
    check("reduce_scatter", in, out, in);
    auto sum = at::empty(in.sizes(), in.options().device(c10::kCPU));
    c10d::AllreduceOptions how;
    how.reduceOp = options.reduceOp;
    auto before = [sum, x = on_host(in)]() mutable { sum.copy_(x); };
    auto after = [sum, y = on_host(out), rank = getRank(), size = getSize()]() mutable {
      y.copy_(sum.view({size, -1})[rank].view(y.sizes()));
    };
    return queue(out, [gloo = gloo_, sum, how, before]() mutable {
      before();
      std::vector<at::Tensor> tensors{sum};
      return gloo->allreduce(tensors, how);
    }, after);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(tensors.size() == 1, "all_reduce: got ", tensors.size(), " tensors, expected one, as NCCL does");
    check("all_reduce", tensors[0], tensors[0], {});
    std::vector<at::Tensor> host;
    for (auto& t : tensors) host.push_back(on_host(t));
    return queue(tensors.at(0), [gloo = gloo_, host, options]() mutable { return gloo->allreduce(host, options); });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::shared_ptr<std::atomic<bool>> aborted_;
  int device_ = -1;  // a rank's communicator has one

  // Of `in` and `out`, `full` is the one that has the slices of all ranks, if one has.
  void check(const std::string& what, const at::Tensor& in, const at::Tensor& out, const at::Tensor& full) {
    int device = in.device().index();
    if (device_ < 0) device_ = device;
    for (auto& t : {in, out}) {
      TORCH_CHECK(t.device().type() == c10::kPrivateUse1 && t.device().index() == device_, what, ": got a tensor on ",
                  t.device(), ", expected device ", device_, ", which is that of the rank's communicator");
      TORCH_CHECK(t.is_contiguous(), what, ": got a tensor with gaps, strides ", t.strides(), ", expected a dense one");
    }
    TORCH_CHECK(in.dtype() == out.dtype(), what, ": got ", in.dtype(), " in and ", out.dtype(), " out, expected one");
    auto type = in.scalar_type();
    TORCH_CHECK(c10::isFloatingType(type) || type == at::kByte || type == at::kChar || type == at::kInt ||
                    type == at::kLong || type == at::kBool, what, ": got ", in.dtype(), ", which NCCL has not");
    if (full.defined()) {
      auto& mine = full.is_same(in) ? out : in;
      TORCH_CHECK(full.numel() == mine.numel() * getSize(), what, ": got ", full.numel(), " elements of all ranks and ",
                  mine.numel(), " of one, expected ", getSize(), " times as many");
      auto* from = static_cast<const char*>(full.const_data_ptr());
      auto* own = static_cast<const char*>(mine.const_data_ptr());
      bool apart = own + mine.nbytes() <= from || from + full.nbytes() <= own;
      TORCH_CHECK(apart || own == from + getRank() * mine.nbytes(), what,
                  ": got memory that overlaps, expected none, or in place: at the rank's own slice");
    }
    std::lock_guard lock(issuing);
    issued.emplace_back(what, c10::toString(type), in.numel(), device, current_stream(device_)->id);
  }

  static at::Tensor on_host(const at::Tensor& t) {
    return at::from_blob(stream_view(t.const_data_ptr()), t.sizes(), t.strides(), t.options().device(c10::kCPU));
  }
  template <class F>
  c10::intrusive_ptr<c10d::Work> queue(const at::Tensor& t, F collective, Task after = [] {}) {
    auto* stream = current_stream(t.device().index());
    ++launches;
    auto done = std::make_shared<EventState>();
    auto work = c10::make_intrusive<QueuedWork>(done, t.device().index());
    stream->put([collective, after, issued = work, aborted = aborted_]() mutable {
      try {
        auto work = collective();
        while (!work->isCompleted() && !*aborted) StreamQueue::sleep(1e-4);
        if (work->isCompleted()) {
          work->wait();  // raises what went wrong
          return after();
        }
      } catch (const std::exception&) {  // a rank is gone: gloo says so, NCCL's kernel would wait for ever
        if (links_report_errors) issued->set_exception(std::current_exception());
        while (!*aborted) StreamQueue::sleep(1e-3);
      }
      fail("the group was aborted");
    });
    stream->record(done);
    return work;
  }
};

}  // namespace pretend

inline void bind_collectives(py::module_& m) {
  m.def("issued", [] {  // since the last call
    std::lock_guard lock(pretend::issuing);
    return std::exchange(pretend::issued, {});
  });
  using pretend::Collectives;
  m.def("report_link_errors", [](bool on) { pretend::links_report_errors = on; });
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
