// What torch asks of a backend, for the pretend device: guards, hooks, generators, and every operation as a task on the
// caller's current stream, done there by the CPU's kernel.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "collectives.h"
#include "memory.h"

namespace pretend {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

// ---- devices, streams, events -----------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static DeviceIndex index(Device d) { return d.index() < 0 ? current_device : d.index(); }
  static Stream wrap(StreamQueue* s) { return Stream(Stream::UNSAFE, Device(TYPE, s->device), s->id); }
  static Event& event(void* e) { return *static_cast<Event*>(e); }

  c10::DeviceType type() const override { return TYPE; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(Device d) const override { current_device = index(d); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = index(d); }
  Device exchangeDevice(Device d) const override { return {TYPE, std::exchange(current_device, index(d))}; }

  Stream getStream(Device d) const override { return wrap(current_stream(index(d))); }
  Stream getDefaultStream(Device d) const override { return wrap(stream_of(index(d))); }
  Stream getNewStream(Device d, int) const override { return (stream_of(0), wrap(new_stream(index(d)))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto& current = current_streams[size_t(s.device_index())];
    return wrap(stream_of(std::exchange(current, s.id())));
  }
  bool queryStream(const Stream& s) const override {
    bool done = stream_of(s.id())->idle();
    if (done) raise_error();
    return done;
  }
  void synchronizeStream(const Stream& s) const override { stream_of(s.id())->synchronize(); }
  void synchronizeDevice(DeviceIndex d) const override {
    std::vector<StreamQueue*> all;
    {
      std::lock_guard lock(streams_mutex);
      all = streams;
    }
    for (auto* s : all)
      if (s->device == d) s->synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override { allocator.recordStream(p, s); }

  void record(void** e, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*e) *e = new Event(std::make_shared<EventState>());
    stream_of(s.id())->record(event(*e));
  }
  void block(void* e, const Stream& s) const override {
    if (e) stream_of(s.id())->wait_for(event(e));
  }
  bool queryEvent(void* e) const override {
    bool done = !e || event(e)->query();
    if (done) raise_error();
    return done;
  }
  void synchronizeEvent(void* e) const override {
    if (e) event(e)->wait(event(e)->last_version());
    raise_error();
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    TORCH_CHECK(event(a)->device == event(b)->device, "pretend device: got events of two devices, whose clocks differ");
    return std::chrono::duration<double, std::milli>(event(b)->at - event(a)->at).count();
  }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(TYPE, &allocator);

// ---- random numbers: the CPU's generators, so that a seed gives the CPU's numbers -------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex d) {
    device_ = Device(TYPE, d);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
at::Generator& default_generator(DeviceIndex d) {
  static auto all = [] {
    std::vector<at::Generator> made;
    for (int n = 0; n < DEVICES; ++n) made.push_back(at::make_generator<Generator>(DeviceIndex(n)));
    return made;
  }();
  return all[size_t(d < 0 ? current_device : d)];
}
// A CPU generator that begins where `g` is; `g` itself moves on, so that the next draw is another one.
at::Generator fork(at::Generator& g) {
  std::lock_guard lock(g.mutex());
  auto out = at::make_generator<at::CPUGeneratorImpl>(0);
  out.set_state(g.get_state());
  static_cast<Generator*>(g.unsafeGetGeneratorImpl())->random64();
  return out;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex d) const override { current_device = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current_device, d); }
  Device getDeviceFromPtr(void* p) const override { return {TYPE, device_of(p)}; }
  bool isPinnedPtr(const void* p) const override { return is_registered(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? 0 : d); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    TORCH_CHECK(!storage.nbytes(), "pretend device: only an empty storage can be resized");
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(allocator.allocate(bytes));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// ---- operations -------------------------------------------------------------------------------------------------

using Stack = torch::jit::Stack;
using Values = std::vector<c10::IValue>;

bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == TYPE; }

// The same memory as a CPU tensor. It keeps nothing alive: what is freed too early is read after it was poisoned.
at::Tensor borrowed(const at::Tensor& t) {
  auto options = t.options().device(c10::kCPU);
  auto* p = const_cast<void*>(t.const_data_ptr());
  return t.numel() ? at::from_blob(stream_view(p), t.sizes(), t.strides(), options)
                   : at::empty_strided(t.sizes(), t.strides(), options);
}

// What a kernel call must not meet again: autograd, functorch and Python modes have had their turn.
struct PlainKernels {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchBatched,
                           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                           c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

void launch(Device device, Task task) {
  if (sticky) raise_error();
  ++launches;
  current_stream(device.index())->put([task = std::move(task)] {
    PlainKernels plain;
    task();
  });
}

template <class F>  // `f` of every tensor in a value
c10::IValue each_tensor(const c10::IValue& v, const F& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : v.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional(f(*t)) : t);
    return out;
  }
  return v;
}
at::Tensor with_wrapped_number_of(const at::Tensor& t, at::Tensor out) {
  if (t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number())
    out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}
Device device_of_call(const Values& args) {
  Device device(TYPE, current_device);
  for (const auto& v : args) {
    each_tensor(v, [&](const at::Tensor& t) { return (is_here(t) ? void(device = t.device()) : void(), t); });
    if (v.isDevice() && v.toDevice().type() == TYPE && v.toDevice().has_index()) device = v.toDevice();
  }
  return device;
}

// What a Meta kernel can tell of a call: its operation, the tensors' shapes, strides and types, which of them are the
// same one, and all other values. Empty if a value is of another kind.
std::string signature(const c10::OperatorHandle& op, const Values& args) {
  std::string key;
  auto put = [&](auto x) { key.append(reinterpret_cast<const char*>(&x), sizeof x); };
  auto put_all = [&](const auto& xs) {
    put(xs.size());
    for (typename std::decay_t<decltype(xs)>::value_type x : xs) put(x);  // a vector<bool> has proxies
  };
  std::vector<const void*> tensors;
  bool known = true;
  auto put_tensor = [&](const at::Tensor& t) {
    put(t.defined());
    if (!t.defined()) return t;
    known &= is_here(t) || !t.dim();  // a Meta kernel may read the others
    tensors.push_back(t.unsafeGetTensorImpl());
    put(std::find(tensors.begin(), tensors.end(), tensors.back()) - tensors.begin());
    put(is_here(t)), put(t.scalar_type()), put(t.unsafeGetTensorImpl()->is_wrapped_number());
    put_all(t.sizes()), put_all(t.strides());
    return t;
  };
  put(&op.schema());
  for (const auto& v : args) {
    put(char(v.isTensor() ? 't' : v.isNone() ? 'n' : v.isInt() ? 'i' : v.isDouble() ? 'd' : v.isBool() ? 'b' : 0));
    if (v.isTensor()) put_tensor(v.toTensor());
    else if (v.isInt()) put(v.toInt());
    else if (v.isDouble()) put(v.toDouble());
    else if (v.isBool()) put(v.toBool());
    else if (v.isString()) put('s'), put_all(v.toStringRef());
    else if (v.isIntList()) put('I'), put_all(v.toIntVector());
    else if (v.isDoubleList()) put('D'), put_all(v.toDoubleVector());
    else if (v.isBoolList()) put('B'), put_all(v.toBoolList().vec());
    else if (v.isTensorList() || v.isOptionalTensorList())
      put('T'), put(v.toListRef().size()), each_tensor(v, put_tensor), put(char(v.isTensorList()));
    else known &= v.isNone() || v.isDevice() || v.isGenerator();
  }
  return known ? key : "";
}

// The outputs' shapes, from the Meta kernel. `out=` tensors that came empty get theirs. Most of these kernels are
// Python and take longer than the operation, so what one has told of a call is kept for its likes.
Stack infer_outputs(const c10::OperatorHandle& op, const Values& args) {
  static std::mutex mutex;
  static auto& kept = *new std::unordered_map<std::string, Stack>();  // Python is gone when statics are destroyed
  const auto key = signature(op, args);
  if (!key.empty()) {
    std::lock_guard lock(mutex);
    if (auto found = kept.find(key); found != kept.end()) return found->second;
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> metas;
  Stack stack;
  for (const auto& v : args) {
    if (v.isGenerator()) stack.emplace_back();
    else if (v.isDevice()) stack.emplace_back(Device(c10::kMeta));
    else stack.push_back(each_tensor(v, [&](const at::Tensor& t) {
      if (!is_here(t)) return t;
      for (auto& [original, meta] : metas)
        if (original.is_same(t)) return meta;
      auto meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
      return metas.emplace_back(t, with_wrapped_number_of(t, meta)).second;
    }));
  }
  {
    PlainKernels plain;
    op.callBoxed(&stack);
  }
  bool resized = false;
  for (auto& [original, meta] : metas)
    if (original.sizes() != meta.sizes()) original.resize_(meta.sizes()), resized = true;
  if (!key.empty() && !resized) {
    std::lock_guard lock(mutex);
    kept.emplace(key, stack);
  }
  return stack;
}

// The argument that a return is, by the schema (an in-place or out= operation); -1 for a new tensor.
int written_argument(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  if (!returned.alias_info() || !returned.alias_info()->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && alias->beforeSets() == returned.alias_info()->beforeSets()) return int(i);
  }
  return -1;
}

void queue_operation(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  auto last = torch::jit::last(*stack, schema.arguments().size());
  Values args(last.begin(), last.end());
  Device device = device_of_call(args);
  c10::DeviceGuard device_guard(device);

  bool takes_generator = false;
  std::optional<at::Generator> random;  // for an operation that draws and takes no generator
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    for (size_t i = 0; i < args.size(); ++i) {
      if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
      auto generator = args[i].isNone() ? default_generator(device.index()) : args[i].toGenerator();
      args[i] = fork(generator);
      takes_generator = true;
    }
    if (!takes_generator) random = fork(default_generator(device.index()));
  }

  Stack meta = infer_outputs(op, args);
  Values results;
  std::vector<std::pair<size_t, at::Tensor>> fresh;  // of which return, and where its data goes
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    int written = written_argument(schema, schema.returns()[i]);
    results.push_back(written >= 0 ? args[size_t(written)] : each_tensor(meta[i], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(device));
      fresh.emplace_back(i, borrowed(out));
      return out;
    }));
  }

  Stack cpu;
  std::vector<std::pair<size_t, at::Tensor>> outs;  // out=: some kernels resize it on the way, so a new one each time
  for (size_t i = 0; i < args.size(); ++i) {
    if (schema.arguments()[i].is_out() && is_here(args[i].toTensor())) {
      outs.emplace_back(i, borrowed(args[i].toTensor()));
      cpu.emplace_back();
    } else if (args[i].isDevice()) {
      cpu.emplace_back(Device(c10::kCPU));
    } else {
      cpu.push_back(each_tensor(args[i], [](const at::Tensor& t) {  // host scalars are taken as they are now
        return is_here(t) ? borrowed(t) : t.defined() ? with_wrapped_number_of(t, t.clone()) : t;
      }));
    }
  }
  launch(device, [op, cpu, fresh, outs, random]() mutable {
    std::vector<at::Tensor> computed;
    for (auto& [i, target] : outs) cpu[i] = computed.emplace_back(at::empty({0}, target.options()));
    try {
      // The Meta kernel keeps the statistics of a 16-bit layer norm in fp32, the CPU's in 16 bits.
      if (op.schema().name() == "aten::native_layer_norm_backward")
        for (size_t i : {3, 4}) cpu[i] = cpu[i].toTensor().to(cpu[1].toTensor().scalar_type());
      if (random) {
        auto& shared = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
        auto before = shared.get_state();
        shared.set_state(random->get_state());
        op.callBoxed(&cpu);
        shared.set_state(before);
      } else {
        op.callBoxed(&cpu);
      }
      for (size_t n = 0; n < outs.size(); ++n) outs[n].second.copy_(computed[n]);
      auto next = fresh.begin();
      for (size_t i = 0; i < cpu.size(); ++i)
        each_tensor(cpu[i], [&](const at::Tensor& t) {
          if (!t.defined() || next == fresh.end() || next->first != i) return t;
          // With fixed statistics the CPU's batch norm saves none, where the Meta kernel has room for them.
          auto& into = (next++)->second;
          if (t.numel()) into.copy_(t);
          return t;
        });
    } catch (const c10::Error& error) {
      fail(toString(op.operator_name()) + ": " + error.what_without_backtrace());
    }
  });
  torch::jit::drop(*stack, args.size());
  for (auto& r : results) stack->push_back(std::move(r));
}

// ---- the operations that are not computations -------------------------------------------------------------------

Device place_for(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(TYPE, current_device);
}
at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(place_for(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(place_for(device));
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Asynchronous where a GPU's copies are: within devices, and for non_blocking ones of page-locked memory. Those keep
// nothing alive, and a host target is filled with NaN first: who reads it before the end does not read the old value.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto& host = is_here(to) ? from : to;
  Device device = is_here(from) ? from.device() : to.device();
  c10::DeviceGuard guard(device);
  bool to_host = !is_here(to), async = is_here(host) || (non_blocking && is_registered(host.const_data_ptr()));
  // Between devices, as CUDA: on the source's stream, after and before what the target's does.
  auto order = [&](Device first, Device then) {
    if (!is_here(from) || !is_here(to) || from.device() == to.device()) return;
    auto ready = std::make_shared<EventState>();
    current_stream(first.index())->record(ready);
    current_stream(then.index())->wait_for(ready);
  };
  order(to.device(), device);
  auto x = is_here(from) || async ? borrowed(from) : from.clone(), y = borrowed(to);
  launch(device, [x, y, to_host]() mutable {
    if (to_host && y.is_non_overlapping_and_dense()) {
      memset(y.mutable_data_ptr(), NAN_BYTE, y.nbytes());
      if (max_delay > 0) StreamQueue::sleep(max_delay / 4);
    }
    y.copy_(x);
  });
  order(device, to.device());
  if (!async) current_stream(device.index())->synchronize();
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& t) {
  current_stream(t.device().index())->synchronize();
  PlainKernels plain;
  return borrowed(t).item();
}
bool equal(const at::Tensor& a, const at::Tensor& b) {
  current_stream(a.device().index())->synchronize();
  PlainKernels plain;
  return at::equal(borrowed(a), borrowed(b));
}
const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto need = at::detail::computeStorageNbytesContiguous(size, t.element_size(), size_t(t.storage_offset()));
  if (need > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), need);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto numel = int64_t(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {numel}, {1});
}
void record_stream(at::Tensor& t, Stream s) { allocator.recordStream(t.storage().data_ptr(), s); }

}  // namespace pretend

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretend::queue_operation>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", pretend::empty);
  m.impl("empty_strided", pretend::empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", pretend::resize_);
  m.impl("set_.source_Storage_storage_offset", pretend::set_storage);
  m.impl("set_.source_Storage", pretend::set_whole_storage);
  m.impl("_copy_from", pretend::copy_from);
  m.impl("_copy_from_and_resize", pretend::copy_from_and_resize);
  m.impl("_local_scalar_dense", pretend::item);
  m.impl("equal", pretend::equal);
  m.impl("record_stream", pretend::record_stream);
  // One launch, as a GPU's; torch has operations on lists one by one elsewhere.
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&pretend::queue_operation>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  at::globalContext().lazyInitDevice(TYPE);
  m.def("device_count", [] { return DEVICES; });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) {
    TORCH_CHECK(0 <= d && d < DEVICES, "pretend device: got device ", d, " of ", DEVICES);
    current_device = c10::DeviceIndex(d);
  });
  m.def("default_generator", [](int d) { return default_generator(c10::DeviceIndex(d)); });
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("delay", [](double seconds, uint64_t seed) { max_delay = seconds, delay_seed = seed; });
  m.def("set_capacity", [](int d, size_t bytes) { arena(c10::DeviceIndex(d)).capacity = std::min(bytes, ROOM); });
  m.def("set_sticky", [](bool on) { sticky = on; });
  m.def("clear_error", &clear_error);
  m.def("stall", [] { current_stream(current_device)->put(stall(), false); });
  m.def("end_stalls", &end_stalls);
  m.def("launches", [] { return launches.load(); });
  m.def("num_streams", [] { return streams.size(); });
  bind_collectives(m);
}
