// The Python face of reading plans. kernels/plan_engine.py is its only user; it has checked shapes and types.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "lz4.h"
#include "plans.h"

namespace py = pybind11;

namespace kv {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Columns are checked here as well: a row too few would be read past its end.
template <typename T>
const T* rows(const Array<T>& array, std::size_t blocks, std::size_t units, const char* name) {
    if (static_cast<std::size_t>(array.size()) != blocks * units) throw py::value_error(std::string(name) + " has other rows than blocks and units");
    return array.data();
}

using Files = std::vector<std::tuple<int, std::uintptr_t, std::uint64_t>>;

void set_blocks(PlanEngine& engine, std::uint64_t plan, const Array<std::uint32_t>& blocks, std::uint32_t kind, const Files& files,
                const Array<std::int32_t>& file, const Array<std::uint8_t>& planes,
                const std::tuple<Array<std::uint64_t>, Array<std::uint32_t>, Array<std::uint32_t>>& columns) {
    const auto count = static_cast<std::size_t>(blocks.size());
    const auto& [offsets, lengths, crcs] = columns;
    const std::size_t units = count == 0 ? 0 : static_cast<std::size_t>(offsets.size()) / count;
    PlanColumns given{};
    given.blocks.assign(blocks.data(), blocks.data() + count);
    given.kind = kind;
    for (const auto& [fd, version, seen] : files)
        given.files.push_back({fd, reinterpret_cast<const std::atomic<std::uint64_t>*>(version), seen});
    given.file.assign(rows(file, count, 1, "file"), file.data() + count);
    given.planes.assign(rows(planes, count, 1, "planes"), planes.data() + count);
    for (const std::int32_t one : given.file)
        if (one >= static_cast<std::int32_t>(files.size())) throw py::value_error("file names none of files");
    given.offsets = rows(offsets, count, units, "offsets");
    given.lengths = rows(lengths, count, units, "lengths");
    given.crcs = rows(crcs, count, units, "crcs");
    const py::gil_scoped_release released;
    engine.set_blocks(plan, given, units);
}

using Numbers = std::vector<std::uint32_t>;
using KindTuple = std::tuple<Numbers, Numbers, Numbers, std::uint32_t, std::uint32_t>;

std::uint64_t open(PlanEngine& engine, std::uint64_t owner, std::tuple<std::uintptr_t, std::uint32_t, std::size_t> ring,
                   const std::vector<KindTuple>& kinds) {
    std::vector<PlanKind> made;
    for (const auto& [first_unit, slice_bytes, codec, unit_bytes, unit_stride] : kinds) {
        if (first_unit.size() != slice_bytes.size() + 1 || codec.size() != slice_bytes.size()) throw py::value_error("kinds differ in layers");
        made.push_back({first_unit, slice_bytes, codec, unit_bytes, unit_stride});
    }
    return engine.open(owner, {reinterpret_cast<std::uint8_t*>(std::get<0>(ring)), std::get<1>(ring), std::get<2>(ring)}, std::move(made));
}

std::pair<std::uint32_t, std::uint64_t> begin(PlanEngine& engine, std::uint64_t plan, std::pair<std::uint32_t, std::uint32_t> layers,
                                              const std::optional<std::vector<std::uint32_t>>& blocks) {
    const py::gil_scoped_release released;
    const PlanPassed passed = engine.begin(plan, layers.first, layers.second, blocks ? &*blocks : nullptr);
    return {passed.pass, passed.pieces};
}

using Told = std::vector<std::tuple<std::uint64_t, int, std::uint32_t, std::uint32_t, bool>>;

Told events(PlanEngine& engine, double seconds) {
    std::vector<PlanEvent> found;
    {
        const py::gil_scoped_release released;
        found = engine.events(seconds);
    }
    Told told;
    for (const PlanEvent& one : found) told.emplace_back(one.plan, static_cast<int>(one.kind), one.sequence, one.block, one.stale);
    return told;
}

bool fill(PlanEngine& engine, std::uint64_t plan, std::uint32_t sequence, std::uint64_t to, const py::buffer& data) {
    const py::buffer_info info = data.request();
    const py::gil_scoped_release released;
    return engine.fill(plan, sequence, to, static_cast<const std::uint8_t*>(info.ptr), static_cast<std::size_t>(info.size * info.itemsize));
}

}  // namespace

void bind_plans(py::module_& module) {
    using Released = py::call_guard<py::gil_scoped_release>;
    py::class_<PlanEngine>(module, "PlanEngine")
        .def(py::init<int, std::size_t>())
        .def("stop", &PlanEngine::stop, Released())
        .def("add_bell", &PlanEngine::add_bell)
        .def("remove_bell", &PlanEngine::remove_bell)
        .def("open", &open)
        .def("add_blocks", &PlanEngine::add_blocks, Released())
        .def("set_blocks", &set_blocks)
        .def("stale_blocks", &PlanEngine::stale_blocks, Released())
        .def("begin", &begin)
        .def("drop", &PlanEngine::drop, Released())
        .def("retry", &PlanEngine::retry, Released())
        .def("fail", &PlanEngine::fail, Released())
        .def("close", &PlanEngine::close, Released())
        .def("progress", &PlanEngine::progress, Released())
        .def("events", &events)
        .def("fills",
             [](PlanEngine& engine, std::uint64_t plan, std::uint32_t sequence) {
                 std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>> wanted;
                 for (const PlanFill& one : engine.fills(plan, sequence)) wanted.emplace_back(one.block, one.layer, one.to);
                 return wanted;
             })
        .def("fill", &fill)
        .def("filled", &PlanEngine::filled, Released())
        .def("stats", [](PlanEngine& engine) {
            const PlanStats stats = engine.stats();
            return std::tuple(stats.reads, stats.read_bytes, stats.units, stats.landed_bytes, stats.stale, stats.failed);
        });
    module.def("plan_decode", [](const py::buffer& coded, std::size_t size, int planes) -> std::optional<py::bytes> {
        const py::buffer_info info = coded.request();
        std::string split(size, '\0'), joined(size, '\0');
        const auto* const from = static_cast<const std::uint8_t*>(info.ptr);
        auto* const to = reinterpret_cast<std::uint8_t*>(split.data());
        if (!lz4_decode(from, static_cast<std::size_t>(info.size * info.itemsize), to, size)) return std::nullopt;
        join_planes(to, reinterpret_cast<std::uint8_t*>(joined.data()), size, planes);
        return py::bytes(joined);
    });
    module.attr("PLAN_CONTROL_BYTES") = kPlanControlBytes;
    module.attr("PLAN_SLOTS_MAX") = kPlanSlotsMax;
    module.def("plan_wait", [](std::uintptr_t control, std::uint32_t landed, double seconds) {
        PlanSeen seen{};
        {
            const py::gil_scoped_release released;
            seen = plan_wait(*reinterpret_cast<const PlanControl*>(control), landed, seconds);
        }
        return std::tuple(seen.landed, seen.state, seen.reason, seen.block);
    });
    module.def("plan_done", [](std::uintptr_t control, std::uint32_t done, int bell) {
        plan_done(*reinterpret_cast<PlanControl*>(control), done, bell);
    });
}

}  // namespace kv
