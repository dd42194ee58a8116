// Streams of the pretend device: each is a thread with a queue, and delays every piece of work at random.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace pretend {

using Clock = std::chrono::steady_clock;
using Task = std::function<void()>;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;

inline std::atomic<double> max_delay{0};   // seconds, before each task
inline std::atomic<uint64_t> delay_seed{0};
inline std::atomic<int64_t> launches{0};   // operations and copies that were queued

// ---- errors: a task that fails is noticed by whoever synchronizes next, as on a GPU -----------------------------

inline std::mutex error_mutex;
inline std::string first_error;
inline std::atomic<bool> failed{false}, sticky{false};  // sticky: every later call raises, too

inline void fail(const std::string& what) {
  std::lock_guard lock(error_mutex);
  if (first_error.empty()) first_error = what;
  failed = true;
}
inline void clear_error() {
  std::lock_guard lock(error_mutex);
  first_error.clear();
  failed = false;
}
inline void raise_error() {
  if (!failed) return;
  std::string what;
  {
    std::lock_guard lock(error_mutex);
    what = first_error;
  }
  if (!sticky) clear_error();
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "pretend device: " + what);
}

// ---- a hang: tasks that wait until they are let go --------------------------------------------------------------

inline std::mutex stall_mutex;
inline std::condition_variable stall_ended;
inline int stalls_ended = 0;

inline Task stall() {
  std::unique_lock lock(stall_mutex);
  return [until = stalls_ended + 1] {
    std::unique_lock lock(stall_mutex);
    stall_ended.wait(lock, [&] { return stalls_ended >= until; });
  };
}
inline void end_stalls() {
  std::lock_guard lock(stall_mutex);
  ++stalls_ended;
  stall_ended.notify_all();
}

// ---- events: recorded again and again, each time a version ------------------------------------------------------

struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  Clock::time_point at{};  // when the last version was done
  c10::DeviceIndex device = -1;

  uint64_t next_version() {
    std::lock_guard lock(mutex);
    return ++recorded;
  }
  uint64_t last_version() {
    std::lock_guard lock(mutex);
    return recorded;
  }
  void finish(uint64_t version) {
    std::lock_guard lock(mutex);
    done = std::max(done, version);
    at = Clock::now();
    changed.notify_all();
  }
  void wait(uint64_t version) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= version; });
  }
  bool query() {
    std::lock_guard lock(mutex);
    return done >= recorded;
  }
};
using Event = std::shared_ptr<EventState>;

// ---- streams ----------------------------------------------------------------------------------------------------

class StreamQueue {
 public:
  const c10::StreamId id;
  const c10::DeviceIndex device;

  StreamQueue(c10::StreamId id, c10::DeviceIndex device) : id(id), device(device) {
    std::thread([this] { run(); }).detach();
  }
  void put(Task task, bool delayed = true) {
    std::lock_guard lock(mutex_);
    tasks_.emplace_back(std::move(task), delayed);
    changed_.notify_one();
  }
  bool idle() {
    std::lock_guard lock(mutex_);
    return tasks_.empty() && !busy_;
  }
  void record(const Event& event) {
    event->device = device;
    put([event, version = event->next_version()] { event->finish(version); }, false);
  }
  void wait_for(const Event& event) {
    put([event, version = event->last_version()] { event->wait(version); }, false);
  }
  void synchronize() {
    auto event = std::make_shared<EventState>();
    record(event);
    event->wait(1);
    raise_error();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Task, bool>> tasks_;
  bool busy_ = false;

  void run() {
    at::set_num_threads(1);
    uint64_t seed = delay_seed;
    std::mt19937_64 random(seed + uint64_t(id) * 7919);
    while (true) {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto [task, delayed] = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      if (seed != delay_seed) random.seed((seed = delay_seed) + uint64_t(id) * 7919);
      if (delayed && max_delay > 0) sleep(std::uniform_real_distribution<double>(0, max_delay)(random));
      try {
        task();
      } catch (const std::exception& error) {
        fail(error.what());
      }
    }
  }

 public:
  static void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
};

// Streams are never destroyed. The first DEVICES are the default streams.
inline std::mutex streams_mutex;
inline std::vector<StreamQueue*> streams;

inline StreamQueue* new_stream(c10::DeviceIndex device) {
  std::lock_guard lock(streams_mutex);
  streams.push_back(new StreamQueue(c10::StreamId(streams.size()), device));
  return streams.back();
}
inline StreamQueue* stream_of(c10::StreamId id) {
  static std::once_flag once;
  std::call_once(once, [] {
    for (int d = 0; d < DEVICES; ++d) new_stream(c10::DeviceIndex(d));
  });
  std::lock_guard lock(streams_mutex);
  return streams.at(size_t(id));
}

// What is current is a fact of each thread, as with CUDA.
inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, DEVICES> current_streams{0, 1, 2, 3};

inline StreamQueue* current_stream(c10::DeviceIndex device) { return stream_of(current_streams[size_t(device)]); }

}  // namespace pretend
