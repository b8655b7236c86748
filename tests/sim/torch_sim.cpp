// SPDX-License-Identifier: Apache-2.0
//
// A torch device ("sim", by PrivateUse1) over the simulated GPU, for tests. Its streams, events and memory are the
// driver's, and torch_ops.cpp enqueues each operator on the current stream. So autograd, hooks, FSDP2 and models run as
// on a GPU: later than their calls, with a backward thread, and in memory that is reused while work on it is still to
// come.
//
// This file tells torch about the device, and is the Python module.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include "torch_memory.h"
#include "torch_ops.h"

namespace sim {

PinnedMemory *const pinned = PinnedMemory::get();
REGISTER_HOST_ALLOCATOR(kSim, pinned)

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = kSim;
    Guard() = default;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return kSim; }
    c10::Device exchangeDevice(c10::Device) const override { return {kSim, 0}; }
    c10::Device getDevice() const override { return {kSim, 0}; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

    c10::Stream getStream(c10::Device) const noexcept override { return torch_stream(current_id); }
    c10::Stream getDefaultStream(c10::Device) const override { return torch_stream(0); }
    c10::Stream getNewStream(c10::Device, int) const override {
        NoGil no_gil;
        return torch_stream(pooled_stream());
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        const auto before = torch_stream(current_id);
        current_id = stream.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override { return native_stream(stream.id()); }
    bool queryStream(const c10::Stream &stream) const override {
        NoGil no_gil;
        return sim_stream_query(native_stream(stream.id())) == 0;
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        NoGil no_gil;
        check(sim_stream_synchronize(native_stream(stream.id())), "to wait for a stream");
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        NoGil no_gil;
        check(sim_device_synchronize(0), "to wait for the device");
    }

    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        NoGil no_gil;
        if (!*event) check(sim_event_create(reinterpret_cast<sim_event *>(event)), "an event");
        check(sim_event_record(static_cast<sim_event>(*event), native_stream(stream.id())), "to record an event");
    }
    void block(void *event, const c10::Stream &stream) const override {
        NoGil no_gil;
        if (event)
            check(sim_stream_wait(native_stream(stream.id()), static_cast<sim_event>(event)), "to wait for an event");
    }
    bool queryEvent(void *event) const override {
        NoGil no_gil;
        return !event || sim_event_query(static_cast<sim_event>(event)) == 0;
    }
    void synchronizeEvent(void *event) const override {
        NoGil no_gil;
        if (event) check(sim_event_synchronize(static_cast<sim_event>(event)), "to wait for an event");
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        NoGil no_gil;
        if (event) sim_event_destroy(static_cast<sim_event>(event));
    }
    void recordDataPtrOnStream(const c10::DataPtr &memory, const c10::Stream &stream) const override {
        DeviceMemory::get()->recordStream(memory, stream);
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator : at::CPUGeneratorImpl {
    Generator() {
        device_ = c10::Device(kSim, 0);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    bool isPinnedPtr(const void *memory) const override { return sim_memory_of(memory) == SIM_PINNED; }
    at::Allocator *getPinnedMemoryAllocator() const override { return pinned; }
    at::Device getDeviceFromPtr(void *) const override { return {kSim, 0}; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override {
        static auto *one = new at::Generator(at::make_generator<Generator>());
        return *one;
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        auto *memory = DeviceMemory::get();
        auto fresh = memory->allocate(bytes);
        const size_t kept = std::min(bytes, storage.nbytes());
        if (kept) memory->copy_data(fresh.mutable_get(), storage.data(), kept);
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    }
};

// A device tensor over memory that is not torch's. Nothing frees it.
at::Tensor view_of(int64_t address, int64_t elems, at::ScalarType dtype) {
    auto memory = at::DataPtr(reinterpret_cast<void *>(address), c10::Device(kSim, 0));
    const size_t bytes = static_cast<size_t>(elems) * c10::elementSize(dtype);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), nullptr, false);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({elems});
    return tensor;
}

py::dict counts() {
    struct sim_counts now;
    {
        NoGil no_gil;
        sim_get_counts(&now);
    }
    py::dict found;
    found["kernels"] = now.kernels;
    found["copies"] = now.copies;
    found["records"] = now.records;
    found["waits"] = now.waits;
    found["counters"] = now.counters;
    found["queries"] = now.queries;
    found["collectives"] = now.collectives;
    found["host_waits"] = now.host_waits;
    found["executor_ns"] = now.executor_ns;
    return found;
}

py::dict host_waits() {
    std::vector<sim_host_wait> waits(64);
    py::dict found;
    waits.resize(std::min(waits.size(), sim_host_waits(waits.data(), waits.size())));
    for (const auto &wait : waits) found[wait.reason] = wait.count;
    return found;
}

} // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    c10::SetAllocator(sim::kSim, sim::DeviceMemory::get(), 100);
    static sim::Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        sim::NoGil no_gil;
        sim_stop();
    }));
    m.def("set_schedule", [](uint64_t lazy, uint64_t seed) {
        sim::NoGil no_gil;
        sim_set_schedule(lazy, seed);
    });
    m.def("finish", [] {
        sim::NoGil no_gil;
        sim_finish();
    });
    m.def("current_handle", [] { return reinterpret_cast<int64_t>(sim::current_stream()); });
    m.def("stream_number", [](int64_t id) { return sim_stream_number(sim::native_stream(id)); });
    m.def("restart_stream_pool", [] { sim::Streams::get().next = 0; });
    m.def("first_error", &sim::first_error);
    m.def("counts", &sim::counts);
    m.def("host_waits", &sim::host_waits);
    m.def("view_of", [](int64_t address, int64_t elems, const py::object &dtype) {
        return sim::view_of(address, elems, reinterpret_cast<THPDtype *>(dtype.ptr())->scalar_type);
    });
}
