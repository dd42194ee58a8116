// Memory of the pretend device: mapped twice, so that the host may not touch it and the streams' threads can. The
// allocator is stream-ordered: freed memory is filled with NaN in its turn and then goes to whoever asks next on the
// same stream, so a missing wait or a missing record_stream shows.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>

#include "streams.h"

namespace pretend {

constexpr size_t ROOM = size_t(8) << 30;  // addresses of a device; a page costs memory when it is touched
constexpr size_t BLOCK = 512;             // an allocation is a multiple of it, as with CUDA
constexpr int NAN_BYTE = 0xFF;

struct Block {
  size_t offset, size;
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> users;  // other streams that were recorded
};
using FreeBlocks = std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>>;

struct Arena {
  char *host_view = nullptr, *stream_view = nullptr;  // the first may not be touched
  size_t top = 0, allocated = 0, peak = 0, capacity = ROOM;
  FreeBlocks free;
  std::vector<std::pair<Block*, std::vector<Event>>> in_use;  // freed, but recorded streams are not there yet

  Arena() {
    int file = memfd_create("pretend", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, off_t(ROOM)) == 0, "pretend device: no memory file");
    auto map = [&](int protection) {
      void* p = mmap(nullptr, ROOM, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(p != MAP_FAILED, "pretend device: cannot map ", ROOM, " bytes");
      return static_cast<char*>(p);
    };
    host_view = map(PROT_NONE);
    stream_view = map(PROT_READ | PROT_WRITE);
    close(file);
  }
};

inline std::mutex memory_mutex;
inline Arena& arena(c10::DeviceIndex device) {
  static std::array<Arena, DEVICES> all;
  return all[size_t(device)];
}
inline c10::DeviceIndex device_of(const void* p) {
  for (c10::DeviceIndex d = 0; d < DEVICES; ++d)
    if (p >= arena(d).host_view && p < arena(d).host_view + ROOM) return d;
  return -1;
}
// The address under which a stream's thread sees what a tensor has at `p`; of host memory, `p` itself.
inline char* stream_view(const void* p) {
  auto at = static_cast<char*>(const_cast<void*>(p));
  auto d = device_of(p);
  return d < 0 ? at : arena(d).stream_view + (at - arena(d).host_view);
}

inline void recycle(Arena& a, Block* block) {
  char* at = a.stream_view + block->offset;
  auto* stream = stream_of(block->stream);
  stream->put([at, n = block->size] { memset(at, NAN_BYTE, n); });
  block->users.clear();
  a.free[{block->stream, block->size}].push_back(block);
}
inline std::vector<Event> record_users(Block* block) {
  std::vector<Event> events;
  for (auto id : block->users) {
    events.push_back(std::make_shared<EventState>());
    stream_of(id)->record(events.back());
  }
  return events;
}
inline void release(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) return;
  std::lock_guard lock(memory_mutex);
  auto& a = arena(block->device);
  a.allocated -= block->size;
  if (block->users.empty()) return recycle(a, block);
  a.in_use.emplace_back(block, record_users(block));
}
inline void recycle_finished(Arena& a) {
  std::erase_if(a.in_use, [&](auto& entry) {
    for (auto& event : entry.second)
      if (!event->query()) return false;
    return recycle(a, entry.first), true;
  });
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto d = current_device;
    if (!bytes) return {nullptr, nullptr, &release, c10::Device(TYPE, d)};
    size_t size = (bytes + BLOCK - 1) / BLOCK * BLOCK;
    auto* stream = current_stream(d);
    std::lock_guard lock(memory_mutex);
    auto& a = arena(d);
    recycle_finished(a);
    TORCH_CHECK_WITH(OutOfMemoryError, a.allocated + size <= a.capacity, "pretend device out of memory: got ",
                     a.allocated, " of ", a.capacity, " bytes allocated, expected ", size, " more");
    auto& list = a.free[{stream->id, size}];
    Block* block;
    if (list.empty()) {
      TORCH_CHECK_WITH(OutOfMemoryError, a.top + size <= ROOM, "pretend device out of addresses");
      block = new Block{a.top, size, d, stream->id, {}};
      a.top += size;
      memset(a.stream_view + block->offset, NAN_BYTE, size);
    } else {
      block = list.back();
      list.pop_back();
    }
    a.allocated += size;
    a.peak = std::max(a.peak, a.allocated);
    return {a.host_view + block->offset, block, &release, c10::Device(TYPE, d)};
  }
  void recordStream(const c10::DataPtr& p, c10::Stream stream) override {
    auto* block = static_cast<Block*>(p.get_context());
    std::lock_guard lock(memory_mutex);
    if (block && stream.id() != block->stream) block->users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = int64_t(arena(d).allocated);
    stats.allocated_bytes[0].peak = int64_t(arena(d).peak);
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = int64_t(arena(d).allocated);
    return stats;
  }
  void resetPeakStats(c10::DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    arena(d).peak = arena(d).allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex d) override {
    std::lock_guard lock(memory_mutex);
    return {arena(d).capacity - arena(d).allocated, arena(d).capacity};
  }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(stream_view(to), stream_view(from), n); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
};
inline Allocator allocator;

// ---- page-locked host memory: what was registered, by its first byte --------------------------------------------

inline std::mutex registered_mutex;
inline std::map<const char*, size_t> registered;

inline void host_register(uintptr_t p, size_t bytes) {
  std::lock_guard lock(registered_mutex);
  registered[reinterpret_cast<const char*>(p)] = bytes;
}
inline void host_unregister(uintptr_t p) {
  std::lock_guard lock(registered_mutex);
  registered.erase(reinterpret_cast<const char*>(p));
}
inline bool is_registered(const void* p) {
  std::lock_guard lock(registered_mutex);
  auto next = registered.upper_bound(static_cast<const char*>(p));
  if (next == registered.begin()) return false;
  --next;
  return static_cast<const char*>(p) < next->first + next->second;
}

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* p) {
    host_unregister(reinterpret_cast<uintptr_t>(p));
    free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* p = nullptr;
    TORCH_CHECK(!posix_memalign(&p, 4096, std::max<size_t>(bytes, 1)), "pretend device: no pinned memory");
    host_register(reinterpret_cast<uintptr_t>(p), std::max<size_t>(bytes, 1));
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
inline PinnedAllocator pinned_allocator;

}  // namespace pretend
