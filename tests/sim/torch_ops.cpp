// SPDX-License-Identifier: Apache-2.0
//
// Operators of the torch device "sim". One boxed fallback takes every aten operator that reaches the device: torch's
// Meta kernel gives the shapes of its results, and torch's CPU kernel is enqueued with the raw addresses. The host goes
// on.
//
// An operator whose result depends on values (nonzero, item, an index by a mask) makes the host wait for its stream, as
// on CUDA; sim_host_waits lists the operator.
#include "torch_ops.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <set>

#include "torch_memory.h"

namespace sim {
namespace {

using torch::jit::Stack;

std::mutex error_lock;
std::string error;

void note_error(const std::string &what) {
    std::lock_guard<std::mutex> hold(error_lock);
    if (error.empty()) error = what;
    std::fprintf(stderr, "sim: %s\n", what.c_str());
}

void wait_for_stream(const std::string &reason) {
    NoGil no_gil;
    const char *before = sim_because(reason.c_str());
    check(sim_stream_synchronize(current_stream()), "to wait for a stream");
    sim_because(before);
}

// --- the tensors of one call ----------------------------------------------------------------------------------------

bool on_device(const at::Tensor &tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory as the executor sees it, the host's as it is when the operation runs. It owns nothing, as a kernel's
// argument.
at::Tensor on_cpu(const at::Tensor &tensor) {
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         tensor.options().device(at::kCPU).pinned_memory(false));
}

at::Tensor as_cpu(const at::Tensor &tensor) { return on_device(tensor) ? on_cpu(tensor) : tensor; }

at::Tensor as_meta(const at::Tensor &tensor) {
    if (!on_device(tensor)) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// A launch takes the values of the host's tensors along.
at::Tensor as_argument(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().is_cpu() ? tensor.clone() : as_cpu(tensor);
}

template <class F>
c10::IValue map_tensors(const c10::IValue &value, c10::Device device, F f) {
    if (value.isTensor()) return f(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> mapped;
        for (const at::Tensor &tensor : value.toTensorVector()) mapped.push_back(f(tensor));
        return mapped;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> mapped;
        for (const auto &tensor : value.toOptionalTensorVector())
            mapped.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : std::nullopt);
        return mapped;
    }
    if (value.isDevice()) return device;
    // CUDA refuses a generator of the CPU. Here it draws, so that tests have the same numbers on each device.
    if (value.isGenerator()) return device.is_cpu() ? value : c10::IValue();
    return value;
}

template <class F>
Stack map_stack(const Stack &values, c10::Device device, F f) {
    Stack mapped;
    for (const auto &value : values) mapped.push_back(map_tensors(value, device, f));
    return mapped;
}

struct Call {
    const c10::OperatorHandle &op;
    const c10::FunctionSchema &schema;
    std::string name;
    Stack args;

    Call(const c10::OperatorHandle &handle, const Stack &stack)
        : op(handle),
          schema(handle.schema()),
          name(c10::toString(schema.operator_name())),
          args(stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size()), stack.end()) {}

    bool is_written(size_t result) const {
        const auto *alias = schema.returns()[result].alias_info();
        return alias && alias->isWrite();
    }
    // The argument that a result is.
    const c10::IValue &written(size_t result) const {
        for (size_t i = 0; i < args.size(); i++) {
            const auto *alias = schema.arguments()[i].alias_info();
            if (alias && *alias == *schema.returns()[result].alias_info()) return args[i];
        }
        TORCH_CHECK(false, "sim: no argument for an aliased result of ", schema);
    }
    void finish(Stack *stack, Stack results) const {
        torch::jit::drop(*stack, args.size());
        for (auto &result : results) stack->push_back(std::move(result));
    }
};

// --- calls that the host waits for --------------------------------------------------------------------------------

const std::set<std::string> depend_on_values{
    "aten::nonzero",    "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount",
    "aten::equal",      "aten::is_set_to",          "aten::repeat_interleave.Tensor"};

bool has_mask(const c10::IValue &value) {
    if (!value.isOptionalTensorList()) return false;
    for (const auto &tensor : value.toOptionalTensorVector())
        if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte))
            return true;
    return false;
}

bool returns_numbers(const c10::FunctionSchema &schema) {
    for (const auto &result : schema.returns())
        if (!result.type()->isSubtypeOf(*c10::TensorType::get()) && result.type()->kind() != c10::TypeKind::ListType)
            return true;
    return false;
}

bool must_wait(const Call &call) {
    if (depend_on_values.count(call.name) || returns_numbers(call.schema)) return true;
    for (const auto &arg : call.args)
        if (has_mask(arg)) return true;
    return false;
}

struct Copy {
    at::Tensor dst, src;
};

void run_copy(void *arg) {
    std::unique_ptr<Copy> copy(static_cast<Copy *>(arg));
    at::AutoDispatchBelowADInplaceOrView below;
    copy->dst.copy_(copy->src);
}

void enqueue_copy(const at::Tensor &dst, const at::Tensor &src) {
    NoGil no_gil;
    check(sim_enqueue(current_stream(), run_copy, new Copy{dst, src}, "copy_"), "a copy");
}

at::Tensor to_device(const at::Tensor &tensor) {
    if (!tensor.defined()) return tensor;
    auto out = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::Device(kSim, 0)));
    enqueue_copy(as_cpu(out), tensor); // behind the NaN of reused memory
    return out;
}

void run_now(const Call &call, Stack *stack) {
    wait_for_stream(call.name);
    Stack cpu = map_stack(call.args, at::kCPU, as_cpu), results;
    at::AutoDispatchBelowADInplaceOrView below;
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu);
    for (size_t i = 0; i < call.schema.returns().size(); i++)
        results.push_back(call.is_written(i) ? call.written(i) : map_tensors(cpu[i], c10::Device(kSim, 0), to_device));
    call.finish(stack, std::move(results));
}

// --- calls that are enqueued --------------------------------------------------------------------------------------

struct Job {
    c10::OperatorHandle op;
    std::string name;
    Stack args;
    std::vector<at::Tensor> results; // memory of fresh ones, in their order
};

std::vector<at::Tensor> fresh_results(const Job &job) {
    std::vector<at::Tensor> fresh;
    const auto &returns = job.op.schema().returns();
    for (size_t i = 0; i < returns.size(); i++) {
        if (returns[i].alias_info() && returns[i].alias_info()->isWrite()) continue;
        if (job.args[i].isTensor()) fresh.push_back(job.args[i].toTensor());
        if (job.args[i].isTensorList())
            for (const at::Tensor &tensor : job.args[i].toTensorVector()) fresh.push_back(tensor);
    }
    return fresh;
}

// Backwards of norms, and the places of their arguments.
struct NormBackward {
    const char *name;
    size_t input, weight, statistics[2];
};
const NormBackward norm_backwards[] = {{"aten::native_layer_norm_backward", 1, 5, {3, 4}},
                                       {"aten::native_group_norm_backward", 1, 4, {2, 3}},
                                       {"aten::native_batch_norm_backward", 1, 2, {5, 6}}};

// The statistics of a norm are fp32 on a device, as the Meta kernels say. The CPU's kernels keep them in the dtype of
// the input, unless the weight has another one, and want that back. They were rounded to it in the forward.
void give_statistics_as_the_cpu_has_them(Job *job) {
    for (const NormBackward &norm : norm_backwards) {
        if (job->name != norm.name) continue;
        const c10::IValue &weight = job->args[norm.weight];
        const auto dtype = job->args[norm.input].toTensor().scalar_type();
        const bool has_weight = weight.isTensor() && weight.toTensor().defined();
        if (has_weight && weight.toTensor().scalar_type() != dtype) return;
        for (const size_t at : norm.statistics) {
            const c10::IValue statistic = job->args[at];
            if (statistic.isTensor() && statistic.toTensor().defined())
                job->args[at] = statistic.toTensor().to(dtype);
        }
    }
}

// The CPU's kernels of these resize their `out` to the shape of the input, and then to a scalar. Memory of the device
// that a tensor borrows has one size, so they get a result of their own. Returns what is to be copied to `out`.
at::Tensor lend_out(Job *job) {
    static const std::set<std::string> resize_twice{"aten::mse_loss.out", "aten::smooth_l1_loss.out"};
    if (!resize_twice.count(job->name)) return {};
    at::Tensor own = at::empty({0}, job->args.back().toTensor().options());
    job->args.back() = own;
    return own;
}

// Statistics that an evaluation does not compute: the CPU's kernel returns tensors of no elements, the shapes say more.
bool is_left_out(const at::Tensor &fresh, const at::Tensor &result) { return !fresh.numel() && result.numel(); }

void run_job(void *arg) {
    std::unique_ptr<Job> job(static_cast<Job *>(arg));
    at::AutoDispatchBelowADInplaceOrView below;
    try {
        give_statistics_as_the_cpu_has_them(job.get());
        const at::Tensor out = job->args.empty() || !job->args.back().isTensor() ? at::Tensor() : job->args.back().toTensor();
        const at::Tensor own = lend_out(job.get());
        job->op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &job->args);
        if (own.defined()) out.copy_(own);
        const auto fresh = fresh_results(*job);
        for (size_t i = 0; i < job->results.size() && i < fresh.size(); i++)
            if (job->results[i].defined() && fresh[i].defined() && !is_left_out(fresh[i], job->results[i]))
                job->results[i].copy_(fresh[i]);
    } catch (const std::exception &failure) {
        note_error(job->name + ": " + failure.what());
    }
}

// Results given as out= may have another size.
void resize_outputs(const Call &call, const Stack &meta) {
    for (size_t i = 0; i < call.args.size(); i++) {
        const auto *alias = call.schema.arguments()[i].alias_info();
        if (!alias || !alias->isWrite() || !meta[i].isTensor() || !meta[i].toTensor().defined()) continue;
        const at::Tensor shape = meta[i].toTensor(), out = call.args[i].toTensor();
        if (shape.is_meta() && shape.sizes() != out.sizes()) at::native::resize_(out, shape.sizes(), std::nullopt);
    }
}

// The results' shapes. False: torch has no Meta kernel for this operator.
bool find_shapes(const Call &call, Stack *results) {
    *results = map_stack(call.args, at::kMeta, as_meta);
    const Stack args = *results;
    try {
        at::AutoDispatchBelowADInplaceOrView below;
        call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), results);
    } catch (const c10::NotImplementedError &) {
        return false;
    }
    resize_outputs(call, args);
    return true;
}

void run(const c10::OperatorHandle &op, Stack *stack) {
    const Call call(op, *stack);
    Stack shapes, results;
    if (must_wait(call) || !find_shapes(call, &shapes)) return run_now(call, stack);
    auto job = std::make_unique<Job>(Job{op, call.name, map_stack(call.args, at::kCPU, as_argument), {}});
    auto allocate = [&](const at::Tensor &shape) {
        at::Tensor out;
        if (shape.defined())
            out = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(c10::Device(kSim, 0)));
        job->results.push_back(as_cpu(out));
        return out;
    };
    for (size_t i = 0; i < call.schema.returns().size(); i++)
        results.push_back(call.is_written(i) ? call.written(i)
                                             : map_tensors(shapes[i], c10::Device(kSim, 0), allocate));
    call.finish(stack, std::move(results));
    NoGil no_gil;
    check(sim_enqueue(current_stream(), run_job, job.release(), "an operator of torch"), "an operator");
}

// --- what is more than arithmetic: memory, views, copies ------------------------------------------------------------

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, DeviceMemory::get(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, DeviceMemory::get(), kKeys, c10::dtype_or_default(dtype));
}

bool is_free_running(const at::Tensor &host, bool non_blocking) { return non_blocking && host.is_pinned(); }

at::Tensor copy_from(const at::Tensor &src, const at::Tensor &dst, bool non_blocking) {
    const bool from_host = src.device().is_cpu(), to_host = dst.device().is_cpu();
    const bool staged = from_host && !is_free_running(src, non_blocking);
    enqueue_copy(on_cpu(dst), staged ? src.clone() : on_cpu(src));
    if (to_host && !is_free_running(dst, non_blocking)) {
        wait_for_stream("a copy to the host");
    } else if ((from_host && !staged) || to_host) {
        NoGil no_gil;
        PinnedMemory::get()->record(from_host ? src.data_ptr() : dst.data_ptr(), current_stream());
    }
    return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor &src, const at::Tensor &dst) {
    at::native::resize_(dst, src.sizes(), std::nullopt);
    return at::native::copy_(const_cast<at::Tensor &>(dst), src, false);
}

at::Scalar item(const at::Tensor &tensor) {
    wait_for_stream("aten::item");
    return at::_local_scalar_dense(as_cpu(tensor));
}

void record_stream(at::Tensor &tensor, c10::Stream stream) {
    DeviceMemory::get()->recordStream(tensor.storage().data_ptr(), stream);
}

// CUDA counts integers too, the kernel of the CPU floats only.
void histc(const c10::OperatorHandle &op, Stack *stack) {
    c10::IValue &values = (*stack)[stack->size() - op.schema().arguments().size()];
    const at::ScalarType type = values.toTensor().scalar_type();
    if (at::isIntegralType(type, false)) values = values.toTensor().to(at::kDouble);
    run(op, stack);
    stack->back() = stack->back().toTensor().to(type);
}

const c10::OperatorHandle &operator_named(const char *name) {
    static std::map<std::string, c10::OperatorHandle> found;
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    return found.try_emplace(name, c10::Dispatcher::singleton().findSchemaOrThrow(name, "")).first->second;
}

// torch asks devices that it does not know for convolutions by other names than the CPU.
void convolve(const c10::OperatorHandle &, Stack *stack) { run(operator_named("aten::convolution"), stack); }

void convolve_backward(const c10::OperatorHandle &op, Stack *stack) {
    const size_t first = stack->size() - op.schema().arguments().size();
    const at::Tensor weight = (*stack)[first + 2].toTensor();
    const bool transposed = (*stack)[first + 6].toBool();
    const int64_t biases = transposed ? weight.size(1) * (*stack)[first + 8].toInt() : weight.size(0);
    stack->insert(stack->begin() + static_cast<std::ptrdiff_t>(first) + 3, c10::IntArrayRef{biases});
    run(operator_named("aten::convolution_backward"), stack);
}

// A cell of an LSTM, which devices have as one kernel and the CPU has not. The workspace has the four gates.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor &input_gates, const at::Tensor &hidden_gates,
                                                         const at::Tensor &cx, const std::optional<at::Tensor> &input_bias,
                                                         const std::optional<at::Tensor> &hidden_bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor sum = input_gates + hidden_gates;
    for (const auto &bias : {input_bias, hidden_bias})
        if (bias && bias->defined()) sum = sum + *bias;
    const auto parts = sum.chunk(4, 1);
    const at::Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh();
    const at::Tensor out = parts[3].sigmoid();
    const at::Tensor cy = forget * cx + in * cell;
    return {out * cy.tanh(), cy, at::cat(std::vector<at::Tensor>{in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor> &grad_hy,
                                                                  const std::optional<at::Tensor> &grad_cy,
                                                                  const at::Tensor &cx, const at::Tensor &cy,
                                                                  const at::Tensor &workspace, bool has_bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto gates = workspace.chunk(4, 1);
    const at::Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3], tanh_cy = cy.tanh();
    const bool has_hy = grad_hy && grad_hy->defined(), has_cy = grad_cy && grad_cy->defined();
    const at::Tensor of_hy = has_hy ? *grad_hy : at::zeros_like(cy);
    at::Tensor of_cy = of_hy * out * (1 - tanh_cy * tanh_cy);
    if (has_cy) of_cy = of_cy + *grad_cy;
    const std::vector<at::Tensor> parts{of_cy * cell * in * (1 - in), of_cy * cx * forget * (1 - forget),
                                        of_cy * in * (1 - cell * cell), of_hy * tanh_cy * out * (1 - out)};
    const at::Tensor of_gates = at::cat(parts, 1);
    return {of_gates, of_cy * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

// Attention by its formula: the CPU's flash kernel has another signature than the devices'.
int64_t attention_kind(const at::Tensor &, const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                       double, bool, std::optional<double>, bool) {
    return 0;
}

} // namespace

std::string first_error() {
    std::lock_guard<std::mutex> hold(error_lock);
    return error;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", at::native::resize_);
    m.impl("set_.source_Storage", at::native::set_);
    m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("record_stream", record_stream);
    m.impl("_fused_sdp_choice", attention_kind);
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
    m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
    m.impl("_thnn_fused_lstm_cell", lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    m.impl("histc", torch::CppFunction::makeFromBoxedFunction<&histc>());
    // Without this line torch takes a formula of other operators, whose bits are not those of the CPU.
    m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

} // namespace sim
