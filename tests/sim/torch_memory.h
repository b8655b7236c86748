// SPDX-License-Identifier: Apache-2.0
//
// Memory of the torch device "sim", by the rules of torch's CUDA allocators.
//
// Device memory that is freed goes back at once to the pool of the stream on which it was allocated; its next owner
// there runs later on that stream. Where record_stream named other streams, it goes back when they have come to this
// point. The next owner begins by filling it with NaN in the order of the stream: that is the earliest write that CUDA
// allows, so whoever still reads the memory without a right to sees NaN. To fill it when it is freed would be stricter
// than CUDA.
//
// Page-locked memory goes back when the copies that it was recorded for are done.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "torch_streams.h"

namespace sim {

inline void check(int result, const char *what) {
    TORCH_CHECK(result == 0, "sim: ", what, " failed with CUresult ", result);
}

// The lock of Python is never held while operations may run: some of them are written in Python.
struct NoGil {
    PyThreadState *state = nullptr;
    NoGil() {
        if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
    }
    ~NoGil() {
        if (state) PyEval_RestoreThread(state);
    }
    NoGil(const NoGil &) = delete;
    NoGil &operator=(const NoGil &) = delete;
};

// Events that have to be complete before something is used again.
struct Uses {
    std::vector<sim_event> events;

    void add(sim_stream stream) {
        sim_event event = nullptr;
        check(sim_event_create(&event), "an event");
        check(sim_event_record(event, stream), "to record an event");
        events.push_back(event);
    }
    bool complete() const {
        for (sim_event event : events)
            if (sim_event_query(event) != 0) return false;
        return true;
    }
    void drop() {
        for (sim_event event : events) sim_event_destroy(event);
        events.clear();
    }
};

class DeviceMemory final : public c10::DeviceAllocator {
  public:
    static DeviceMemory *get() {
        static auto *one = new DeviceMemory;
        return one;
    }

    c10::DataPtr allocate(size_t bytes) override {
        if (!bytes) return {nullptr, nullptr, &release, c10::Device(kSim, 0)};
        NoGil no_gil;
        std::lock_guard<std::recursive_mutex> hold(lock);
        return take((bytes + 511) / 512 * 512);
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *dst, const void *src, size_t bytes) const override {
        NoGil no_gil;
        check(sim_enqueue_copy(current_stream(), dst, src, bytes), "a copy");
    }

    void recordStream(const c10::DataPtr &memory, c10::Stream stream) override {
        std::lock_guard<std::recursive_mutex> hold(lock);
        auto found = live.find(memory.get());
        if (found != live.end() && found->second.stream != stream.id()) found->second.users.insert(stream.id());
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        NoGil no_gil;
        std::lock_guard<std::recursive_mutex> hold(lock);
        collect();
        for (auto &[key, blocks] : pool) {
            for (void *memory : blocks) check(sim_free(memory), "to free memory");
            reserved.decrease(key.second * blocks.size());
        }
        pool.clear();
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0] = allocated;
        stats.reserved_bytes[0] = reserved;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {
        allocated.reset_peak();
        reserved.reset_peak();
    }

  private:
    struct Block {
        size_t bytes;
        c10::StreamId stream;
        std::set<c10::StreamId> users; // further streams that use it
    };
    struct Waiting {
        void *memory;
        Block block;
        Uses uses;
    };
    struct Fill {
        void *memory;
        size_t bytes;
    };

    static void release(void *memory) { get()->give_back(memory); }

    static void fill_with_nan(void *arg) {
        auto *fill = static_cast<Fill *>(arg);
        std::memset(fill->memory, 0xff, fill->bytes);
        delete fill;
    }

    c10::DataPtr take(size_t bytes) {
        collect();
        void *memory = nullptr;
        auto &free = pool[{current_id, bytes}];
        if (!free.empty()) {
            memory = free.back();
            free.pop_back();
            check(sim_enqueue(current_stream(), fill_with_nan, new Fill{memory, bytes}, "a fill of reused memory"),
                  "a fill");
        } else {
            const int result = sim_alloc(0, bytes, &memory);
            TORCH_CHECK_WITH(OutOfMemoryError, result == 0, "sim: no room for ", bytes, " bytes on the simulated GPU");
            reserved.increase(bytes);
        }
        live[memory] = {bytes, current_id, {}};
        allocated.increase(bytes);
        return {memory, memory, &release, c10::Device(kSim, 0)};
    }

    void give_back(void *memory) {
        if (!memory) return;
        NoGil no_gil;
        std::lock_guard<std::recursive_mutex> hold(lock);
        auto found = live.find(memory);
        if (found == live.end()) return;
        const Block block = found->second;
        live.erase(found);
        allocated.decrease(block.bytes);
        if (block.users.empty()) {
            pool[{block.stream, block.bytes}].push_back(memory);
            return;
        }
        Waiting after{memory, block, {}};
        for (auto id : block.users) after.uses.add(native_stream(id));
        waiting.push_back(after);
    }

    void collect() {
        for (size_t i = 0; i < waiting.size();) {
            if (!waiting[i].uses.complete()) {
                i++;
                continue;
            }
            waiting[i].uses.drop();
            pool[{waiting[i].block.stream, waiting[i].block.bytes}].push_back(waiting[i].memory);
            waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }

    std::recursive_mutex lock;
    std::unordered_map<void *, Block> live;
    std::map<std::pair<c10::StreamId, size_t>, std::vector<void *>> pool;
    std::vector<Waiting> waiting;
    c10::CachingAllocator::Stat allocated, reserved;
};

class PinnedMemory final : public at::HostAllocator {
  public:
    static PinnedMemory *get() {
        static auto *one = new PinnedMemory;
        return one;
    }

    at::DataPtr allocate(size_t bytes) override {
        if (!bytes) return {nullptr, nullptr, &release, at::Device(at::kCPU)};
        NoGil no_gil;
        std::lock_guard<std::mutex> hold(lock);
        void *memory = nullptr;
        auto &free = pool[bytes];
        for (size_t i = 0; i < free.size() && !memory; i++) {
            if (!blocks[free[i]].uses.complete()) continue;
            memory = free[i];
            free.erase(free.begin() + static_cast<std::ptrdiff_t>(i));
            blocks[memory].uses.drop();
        }
        if (!memory) {
            check(sim_host_alloc(bytes, &memory), "page-locked memory");
            blocks[memory] = {bytes, {}};
        }
        std::memset(memory, 0xff, bytes);
        return {memory, memory, &release, at::Device(at::kCPU)};
    }
    at::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *dst, const void *src, size_t bytes) const final { std::memcpy(dst, src, bytes); }

    // `memory` may lie inside of a block: a view's.
    void record(const void *memory, sim_stream stream) {
        std::lock_guard<std::mutex> hold(lock);
        auto after = blocks.upper_bound(const_cast<void *>(memory));
        if (after != blocks.begin()) std::prev(after)->second.uses.add(stream);
    }
    bool record_event(void *memory, void *, c10::Stream stream) override {
        NoGil no_gil;
        record(memory, native_stream(stream.id()));
        return true;
    }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}

  private:
    struct Block {
        size_t bytes;
        Uses uses;
    };
    static void release(void *memory) { get()->give_back(memory); }
    void give_back(void *memory) {
        std::lock_guard<std::mutex> hold(lock);
        auto found = blocks.find(memory);
        if (found != blocks.end()) pool[found->second.bytes].push_back(memory);
    }

    std::mutex lock;
    std::map<void *, Block> blocks;
    std::map<size_t, std::vector<void *>> pool;
};

} // namespace sim
