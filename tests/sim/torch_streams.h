// SPDX-License-Identifier: Apache-2.0
//
// Streams of the torch device "sim". torch names a stream by a number, 0 for the default one; the driver by a handle.
// As on CUDA, streams come from a pool that is gone through again and again.
#pragma once

#include <c10/core/Stream.h>

#include <mutex>
#include <vector>

#include "sim.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr size_t kPool = 24; // a process has at most SIM_MOST_STREAMS, the product's among them

inline thread_local c10::StreamId current_id = 0;

struct Streams {
    std::mutex lock;
    std::vector<sim_stream> handles{sim_default_stream(0)};
    size_t next = 0;

    static Streams &get() {
        static auto *one = new Streams;
        return *one;
    }
};

inline sim_stream native_stream(c10::StreamId id) {
    auto &streams = Streams::get();
    std::lock_guard<std::mutex> hold(streams.lock);
    return streams.handles.at(static_cast<size_t>(id));
}

inline sim_stream current_stream() { return native_stream(current_id); }

inline c10::Stream torch_stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, 0), id); }

inline c10::StreamId pooled_stream() {
    auto &streams = Streams::get();
    std::lock_guard<std::mutex> hold(streams.lock);
    const size_t id = 1 + streams.next++ % kPool;
    if (id == streams.handles.size()) {
        sim_stream made = nullptr;
        sim_stream_create(0, &made);
        streams.handles.push_back(made);
    }
    return static_cast<c10::StreamId>(id);
}

} // namespace sim
